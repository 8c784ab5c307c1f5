"""Blocks whose inside only the engine knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.errors import InvalidArgumentError
from kvcached.layouts.base import KVLayout, TokenPart

if TYPE_CHECKING:
    from typing import Self

_STATE_ALIGNMENT = 32  # for the vector loads of kernels


@dataclass(frozen=True)
class PackedLayout(KVLayout):
    """Block in the engine's own format, all layers together. kvcached needs only its size."""

    packed_token_bytes: int = 1

    @property
    def parts(self) -> tuple[TokenPart, ...]:
        """One part, of bytes."""
        return (TokenPart(0, "packed", 1, self.packed_token_bytes),)

    def _of_layers(self, layers: object) -> Self:
        raise InvalidArgumentError("a packed block cannot be split into layers")


def state_layout(size_bytes: int) -> PackedLayout:
    """Returns the layout of the states of sequences, `size_bytes` each: blocks of one "token".

    A size that shares few factors with a page would make large slabs, so it is rounded up to a
    multiple of the largest power of two that takes at most an eighth more.
    """
    unit = padded = _STATE_ALIGNMENT
    while (rounded := -(-size_bytes // unit) * unit) <= max(size_bytes * 9 // 8, padded):
        unit, padded = 2 * unit, rounded
    return PackedLayout(dtype="uint8", block_tokens=1, packed_token_bytes=padded)
