"""What machines say to each other for weights: who has what, and the bytes of tensors, in parts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from prism.messages import Wire

PART_BYTES_MAX = 1 << 20
_Count = Annotated[int, Meta(ge=0)]


class Form(Wire, frozen=True):
    """In which form, as the rest of `kvcached.WeightKey` beside the content."""

    engine: str
    dtype: str
    rank: Annotated[int, Meta(ge=0)] = 0
    ranks: Annotated[int, Meta(ge=1)] = 1


class AskWeights(Wire, frozen=True):
    """Is this model in your store, in all of `forms` or as its files have it? `sketch`: see
    `kvcached.weights.exchange`; whose files are others says that it has nothing."""

    model: str
    sketch: str
    forms: list[Form] = []


class Tensor(Wire, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[_Count, ...]
    blob: str  # its SHA-256


class HeldForm(Wire, frozen=True):
    form: Form
    tensors: list[Tensor]


class HeldWeights(Wire, frozen=True):
    """`hashes`: of the model's files. No forms: it is not there."""

    hashes: list[str] = []
    forms: list[HeldForm] = []


class AskPart(Wire, frozen=True):
    blob: str
    offset_bytes: _Count
    size_bytes: Annotated[int, Meta(ge=1, le=PART_BYTES_MAX)]


class Part(Wire, frozen=True):
    """Answers to one machine come in the order of its questions. Shorter than asked for: it is not
    there any more."""

    data: bytes


FromTaker = AskWeights | AskPart
FromHolder = HeldWeights | Part
