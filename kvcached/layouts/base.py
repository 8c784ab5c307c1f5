"""Arithmetic shared by all layouts: tokens, blocks, slabs, pages and strides."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kvcached.checks import checked, each, not_negative, positive, text
from kvcached.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing import Self

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

Arrangement = Literal["per_layer", "block_interleaved", "token_interleaved"]
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Named part of a token in a layer ("k", "v", "latent"): (heads, dim) numbers."""

    layer: int
    name: str
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Position of a tensor: buffer, offset from its start, and strides in elements."""

    buffer: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KVLayout(ABC):
    """Parts that a token keeps in every layer, and their arrangement in memory.

    `dtype` is a key of DTYPE_BYTES. `block_tokens` is the engine's page size in tokens; a block is
    the unit of alloc_kv. `arrangement` defines what is adjacent:

    - "per_layer": each layer's K and V (or latent) in a separate buffer, without gaps. Kernels see
      the strides of a stock cache. Growth takes pages in every buffer.
    - "block_interleaved": one buffer. All layers of a block are adjacent, each part of it as
      (block_tokens, heads, dim). Kernels see a larger stride from block to block.
    - "token_interleaved": one buffer. All layers of a token are adjacent. Kernels see a larger
      stride from token to token.

    A *slab* is the smallest growth: in every buffer the shortest run of device pages that holds
    whole blocks, since the bytes of a block need not divide a page. `slab_tokens` is the number of
    tokens that it holds, `quantum_bytes` its bytes over all buffers. Admission counts in these.

    `padded_token_bytes` (interleaved only; None: no gap) is a token's size with padding. A width
    that shares few factors with a page makes large slabs, and a gap after each block or token makes
    them small. `choose_layout` finds the size with the smallest cost in quanta.
    """

    dtype: str = "bfloat16"
    block_tokens: int = 16
    arrangement: Arrangement = "per_layer"
    padded_token_bytes: int | None = None

    def __post_init__(self) -> None:
        positive("block_tokens", self.block_tokens)
        _known("dtype", self.dtype, DTYPE_BYTES)
        _known("arrangement", self.arrangement, ARRANGEMENTS)
        if self.padded_token_bytes is not None:
            self._check_padding(positive("padded_token_bytes", self.padded_token_bytes))

    def _check_padding(self, padded_bytes: int) -> None:
        if self.arrangement == "per_layer":
            raise InvalidArgumentError(
                "padded_token_bytes cannot be combined with arrangement 'per_layer'; leave it out"
            )
        if padded_bytes < self.token_bytes or padded_bytes % DTYPE_BYTES[self.dtype]:
            raise InvalidArgumentError(
                f"padded_token_bytes is {padded_bytes}; it must be a multiple of the element size "
                f"and at least the {self.token_bytes} bytes of a token"
            )

    @property
    @abstractmethod
    def parts(self) -> tuple[TokenPart, ...]:
        """Parts of every layer, in memory order."""

    @checked(layers=each(not_negative))
    def of_layers(self, layers: Sequence[int]) -> Self:
        """Returns the layout of these layers alone, numbered from 0 in the order given."""
        if not layers or max(layers) >= self.layer_count:
            raise InvalidArgumentError(f"layers must be some of 0..{self.layer_count - 1}")
        return self._of_layers(layers)

    @abstractmethod
    def _of_layers(self, layers: Sequence[int]) -> Self:
        """Returns the layout of these layers. REQUIRES: layers of this layout, at least one."""

    @property
    def layer_count(self) -> int:
        """Number of layers of the model, or of the group."""
        return self.parts[-1].layer + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, without padding."""
        return sum(self._widths())

    @property
    def buffer_token_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in each buffer, with padding."""
        if self.arrangement == "per_layer":
            return tuple(self._widths())
        return (self.padded_token_bytes or self.token_bytes,)

    @property
    def num_buffers(self) -> int:
        """Number of buffers: address ranges that grow together, one run of pages each."""
        return len(self.buffer_token_bytes)

    def slab_tokens(self, page_bytes: int) -> int:
        """Returns the tokens of one slab."""
        positive("page_bytes", page_bytes)
        widths = set(self.buffer_token_bytes)
        return math.lcm(*(math.lcm(self.block_tokens * w, page_bytes) // w for w in widths))

    def slab_pages(self, page_bytes: int) -> list[int]:
        """Returns the pages of one slab in each buffer."""
        tokens = self.slab_tokens(page_bytes)
        return [tokens * width // page_bytes for width in self.buffer_token_bytes]

    def quantum_bytes(self, page_bytes: int) -> int:
        """Returns the bytes of the smallest growth: one slab in every buffer."""
        return self.slab_tokens(page_bytes) * sum(self.buffer_token_bytes)

    @checked(num_tokens=not_negative, page_bytes=positive, reserved_blocks=not_negative)
    def need_bytes(self, num_tokens: int, page_bytes: int, *, reserved_blocks: int = 1) -> int:
        """Returns the bytes of the slabs for one sequence of `num_tokens` and reserved blocks."""
        blocks = -(-num_tokens // self.block_tokens) + reserved_blocks
        slabs = -(-blocks * self.block_tokens // self.slab_tokens(page_bytes))
        return slabs * self.quantum_bytes(page_bytes)

    @checked(num_blocks=not_negative)
    def blocks_of(self, layer: int, name: str, num_blocks: int) -> TensorPlacement:
        """Returns the placement of a part of a layer: (num_blocks, block_tokens, heads, dim)."""
        part, buffer, offset, token, block = self._place(layer, name)
        shape = (num_blocks, self.block_tokens, part.heads, part.dim)
        return TensorPlacement(buffer, offset, shape, (block, token, part.dim, 1))

    @checked(num_tokens=not_negative)
    def tokens_of(self, layer: int, name: str, num_tokens: int) -> TensorPlacement:
        """Returns the placement of a part of a layer as (num_tokens, heads, dim).

        Raises InvalidArgumentError if the tokens do not have a single stride: for
        "block_interleaved" with blocks of several tokens.
        """
        part, buffer, offset, token, block = self._place(layer, name)
        if self.block_tokens > 1 and block != self.block_tokens * token:
            raise InvalidArgumentError(
                "tokens of interleaved blocks do not have a single stride; use the view by blocks, "
                "or arrangement='token_interleaved'"
            )
        strides = (block // self.block_tokens, part.dim, 1)
        return TensorPlacement(buffer, offset, (num_tokens, part.heads, part.dim), strides)

    def _widths(self) -> list[int]:
        element_bytes = DTYPE_BYTES[self.dtype]
        return [part.heads * part.dim * element_bytes for part in self.parts]

    def _place(self, layer: int, name: str) -> tuple[TokenPart, int, int, int, int]:
        """Returns the part, buffer, offset in bytes, and strides of a token and a block in
        elements.
        """
        index = self._find(layer, name)
        part = self.parts[index]
        row = part.heads * part.dim
        if self.arrangement == "per_layer":
            return part, index, 0, row, self.block_tokens * row
        padded = self.buffer_token_bytes[0] // DTYPE_BYTES[self.dtype]
        before_bytes = sum(self._widths()[:index])
        if self.arrangement == "token_interleaved":
            return part, 0, before_bytes, padded, self.block_tokens * padded
        return part, 0, self.block_tokens * before_bytes, row, self.block_tokens * padded

    def _find(self, layer: int, name: str) -> int:
        not_negative("layer", layer)
        text("name", name)
        for index, part in enumerate(self.parts):
            if (part.layer, part.name) == (layer, name):
                return index
        names = ", ".join(part.name for part in self.parts if part.layer == layer)
        if not names:
            raise InvalidArgumentError(f"layer {layer} is not in 0..{self.layer_count - 1}")
        raise InvalidArgumentError(f"layer {layer} does not have a part {name!r}; it has {names}")


def _known(name: str, value: str, known: Sequence[str] | dict[str, int]) -> None:
    if text(name, value) not in known:
        raise InvalidArgumentError(f"{name} {value!r} is not supported; use {', '.join(known)}")
