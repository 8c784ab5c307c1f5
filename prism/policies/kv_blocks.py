"""How co-located models share KV memory, and what each way costs in memory, block tables and time
(MuxServe §3.4 head-wise blocks; SeaLLM §4.4 and Figure 5, split and merged blocks).

A model's own block holds `block_tokens` tokens of all its layers and heads. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class KvBlocks(Enum):
    """PAGES: each model's own blocks on common pages (Prism §5.1). OWN: a fixed space for each
    model. HEADWISE: one pool of blocks of one head of one layer (MuxServe; SeaLLM's "split").
    MERGED: one pool of blocks of the largest model's size, each of several blocks of a smaller one
    (SeaLLM)."""

    PAGES = "pages"
    OWN = "own"
    HEADWISE = "headwise"
    MERGED = "merged"


STEP_OVERHEAD = {
    KvBlocks.PAGES: 0.0,
    KvBlocks.OWN: 0.0,
    KvBlocks.HEADWISE: 0.04,
    KvBlocks.MERGED: 0.04,
}
"""Fraction by which a step takes longer where models of a device share one pool. SeaLLM §6.4
reports under 4 % for three of six cases and under 8 % for all with merged blocks, and more, without
a figure in the text, for split ones (Figure 9); those are charged no more here."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token's K and V look like. bytes_per_element: of the KV cache's type."""

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_element: int = 2
    block_tokens: int = 16

    @property
    def head_bytes(self) -> int:
        """K and V of one head of one layer, for a block of tokens."""
        return 2 * self.head_dim * self.bytes_per_element * self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.head_bytes * self.layers * self.kv_heads


@dataclass(frozen=True, slots=True)
class Pool:
    """How one model uses a pool that the models of a device share.

    grain_bytes: what it takes at a time; grain_tokens: how many of its tokens that holds; entries:
    block-table entries for each of its own blocks; step_overhead: as in STEP_OVERHEAD."""

    grain_bytes: int
    grain_tokens: int
    entries: int
    step_overhead: float

    def used_bytes(self, tokens: int) -> int:
        """Memory that a request of `tokens` tokens holds."""
        return -(-tokens // self.grain_tokens) * self.grain_bytes


def pool(kind: KvBlocks, shape: KvShape, shared_with: Sequence[KvShape]) -> Pool:
    """The use that a model of `shape` makes of a device's pool. shared_with: all models on it.

    A merged block is as large as the largest model's block and belongs to one request of one model;
    what its blocks do not fill is lost, and so is the end of a request's last one. Raises
    ValueError if heads differ in size: neither method shares memory between them.
    """
    alone = len(shared_with) <= 1
    overhead = 0.0 if alone else STEP_OVERHEAD[kind]
    if kind in (KvBlocks.PAGES, KvBlocks.OWN) or (alone and kind is KvBlocks.MERGED):
        return Pool(shape.block_bytes, shape.block_tokens, 1, overhead)
    heads = {other.head_bytes for other in (shape, *shared_with)}
    if len(heads) > 1:
        raise ValueError(f"heads of {sorted(heads)} bytes a block cannot share one pool")
    if kind is KvBlocks.HEADWISE:
        return Pool(shape.block_bytes, shape.block_tokens, shape.layers * shape.kv_heads, overhead)
    largest = max(other.block_bytes for other in (shape, *shared_with))
    inside = largest // shape.block_bytes
    return Pool(largest, inside * shape.block_tokens, 1, overhead)
