"""Pools of KV blocks that the models of a device share, and what a pool costs in memory and time
(MuxServe §3.4 head-wise blocks; SeaLLM §4.4 and Figure 5, split and merged blocks).

A model's own block holds `block_tokens` tokens of all its layers and heads. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class KvBlocks(Enum):
    """How a pool is cut into blocks."""

    # Blocks of one head of one layer (MuxServe; SeaLLM's "split").
    HEADWISE = "headwise"
    # Blocks of the largest model's size, each of several blocks of a smaller model (SeaLLM).
    MERGED = "merged"


STEP_OVERHEAD = 0.04
"""The fraction by which a step takes longer where models share one pool. SeaLLM §6.4 reports under
4 % for three of six cases and under 8 % for all with merged blocks. It reports more, without a
figure in the text, for split ones (Figure 9); those are charged no more here."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token's K and V look like."""

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
class PoolUse:
    """How one model uses the pool of its device."""

    # What the model takes at a time, and how many of its tokens that holds.
    grain_bytes: int
    grain_tokens: int
    step_overhead: float


def pool(kind: KvBlocks, shape: KvShape, shared_with: Sequence[KvShape]) -> PoolUse:
    """The use that a model of `shape` makes of a device's pool. shared_with: all models on it.

    A merged block is as large as the largest model's block and belongs to one request of one model.
    The memory that its blocks do not fill is lost, and so is the end of a request's last block.
    Raises ValueError if heads differ in size: neither method shares memory between them.
    """
    if len(shared_with) <= 1:
        return PoolUse(shape.block_bytes, shape.block_tokens, 0.0)
    heads = {other.head_bytes for other in (shape, *shared_with)}
    if len(heads) > 1:
        raise ValueError(f"heads of {sorted(heads)} bytes a block cannot share one pool")
    if kind is KvBlocks.HEADWISE:
        return PoolUse(shape.block_bytes, shape.block_tokens, STEP_OVERHEAD)
    largest = max(other.block_bytes for other in (shape, *shared_with))
    inside = largest // shape.block_bytes
    return PoolUse(largest, inside * shape.block_tokens, STEP_OVERHEAD)
