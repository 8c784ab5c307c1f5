"""How a model's KV cache lies in memory: the arithmetic of tokens, blocks, slabs and pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcached.checks import positive
from kvcached.errors import InvalidArgumentError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Layout:
    """Per-layer layout for MHA, GQA and MQA: K and V of each layer in a buffer of their own.

    A buffer has shape (tokens, num_kv_heads, head_dim), V with `v_head_dim` (None: the same).
    `block_tokens` is the engine's page size in tokens; a block is the unit of alloc_kv.

    A *slab* is the smallest growth: in every buffer the shortest run of device pages that holds
    whole blocks, since the bytes of a block need not divide a page. `slab_tokens` says how many
    tokens it holds, `quantum_bytes` what it costs over all buffers; admission counts in these.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            positive(name, getattr(self, name))
        if self.v_head_dim is not None:
            positive("v_head_dim", self.v_head_dim)
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise InvalidArgumentError(f"dtype {self.dtype!r} is not supported; use {known}")

    @property
    def num_buffers(self) -> int:
        """K and V of each layer: 2 x layers, in the order K0, V0, K1, V1, ..."""
        return 2 * self.num_layers

    @property
    def k_token_bytes(self) -> int:
        """Bytes of one token in one K buffer."""
        return self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def v_token_bytes(self) -> int:
        """Bytes of one token in one V buffer."""
        return self.num_kv_heads * (self.v_head_dim or self.head_dim) * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return self.num_layers * (self.k_token_bytes + self.v_token_bytes)

    def slab_tokens(self, page_bytes: int) -> int:
        """Tokens of one slab."""
        positive("page_bytes", page_bytes)
        return math.lcm(
            *(
                math.lcm(self.block_tokens * token, page_bytes) // token
                for token in (self.k_token_bytes, self.v_token_bytes)
            )
        )

    def slab_pages(self, page_bytes: int) -> list[int]:
        """Pages of one slab in each buffer."""
        tokens = self.slab_tokens(page_bytes)
        pages = [tokens * token // page_bytes for token in (self.k_token_bytes, self.v_token_bytes)]
        return pages * self.num_layers

    def quantum_bytes(self, page_bytes: int) -> int:
        """Bytes of the smallest growth: one slab in every buffer."""
        return self.slab_tokens(page_bytes) * self.token_bytes
