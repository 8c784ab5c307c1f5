"""Messages between machines for weights: the contents of weight stores, and bytes of tensors."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from prism.messages import Wire

PART_BYTES_MAX = 1 << 20
_Count = Annotated[int, Meta(ge=0)]


class Form(Wire, frozen=True):
    """Form of stored weights: the fields of `kvcached.WeightKey` other than the content."""

    engine: str
    dtype: str
    rank: Annotated[int, Meta(ge=0)] = 0
    ranks: Annotated[int, Meta(ge=1)] = 1


class AskWeights(Wire, frozen=True):
    """Query whether a machine's store has this model, in all of `forms` or as in its files."""

    model: str
    # See `kvcached.weights.exchange`. A holder with other files answers that it has nothing.
    sketch: str
    forms: list[Form] = []


class Tensor(Wire, frozen=True, array_like=True):
    """A stored tensor."""

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    blob: str  # SHA-256 of its bytes


class HeldForm(Wire, frozen=True):
    """Tensors of a model that is stored in one form."""

    form: Form
    tensors: list[Tensor]


class HeldWeights(Wire, frozen=True):
    """Answer to AskWeights."""

    hashes: list[str] = []  # of the model's files
    forms: list[HeldForm] = []  # empty: the store does not have the model


class AskPart(Wire, frozen=True):
    """Query for bytes of a tensor."""

    blob: str
    offset_bytes: _Count
    size_bytes: Annotated[int, Meta(ge=1, le=PART_BYTES_MAX)]


class Part(Wire, frozen=True):
    """Answer to AskPart. Answers to one machine come in the order of its queries."""

    data: bytes  # shorter than asked for: the tensor is not stored any more


FromTaker = AskWeights | AskPart
FromHolder = HeldWeights | Part
