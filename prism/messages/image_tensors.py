"""Images of a prompt, as the frontend prepared them for the model."""

from __future__ import annotations

from collections.abc import Iterable

from prism.messages import Wire


class Tensor(Wire, frozen=True):
    """Values of a tensor in C order."""

    dtype: str  # by torch's name
    shape: tuple[int, ...]
    data: bytes


class PromptImage(Wire, frozen=True):
    """Image of a request. The queue has its name; the agent adds its tensors for the engine."""

    # Digest of the tensors, 32 bytes in hexadecimal: equal for equal images.
    digest: str
    # First and last position of each run of its placeholders in the prompt.
    runs: tuple[tuple[int, int], ...]
    # Inputs of the model's vision tower by transformers' names, such as `pixel_values`.
    tensors: dict[str, Tensor] = {}


Tensors = dict[str, Tensor]


def size_bytes(images: Iterable[Tensors]) -> int:
    return sum(len(tensor.data) for image in images for tensor in image.values())
