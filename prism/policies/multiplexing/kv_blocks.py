"""Pools of KV blocks that the models of a device share, with their cost in memory and time.

Sources: MuxServe §3.4 (head-wise blocks), SeaLLM §4.4 and Figure 5 (split and merged blocks). A
model's own block holds `block_tokens` tokens of all its layers and heads. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class KvBlocks(Enum):
    """Kind of blocks in a shared pool."""

    # Blocks of one head of one layer (MuxServe; SeaLLM's "split").
    HEADWISE = "headwise"
    # Blocks as large as the largest model's, holding several blocks of a smaller model (SeaLLM).
    MERGED = "merged"


STEP_OVERHEAD = 0.04
"""Fraction by which a step takes longer with a shared pool.

SeaLLM §6.4 reports under 4 % for three of six cases and under 8 % for all with merged blocks. For
split blocks it reports more (Figure 9), without a number in the text; they use the same value here.
"""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of a token's K and V."""

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_element: int = 2
    block_tokens: int = 16

    @property
    def head_bytes(self) -> int:
        """Size of K and V of one head of one layer, for a block of tokens."""
        return 2 * self.head_dim * self.bytes_per_element * self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.head_bytes * self.layers * self.kv_heads


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Use of a device's pool by one model."""

    # Size of one allocation.
    grain_bytes: int
    # Tokens of the model in one allocation.
    grain_tokens: int
    # Fraction by which the model's steps take longer.
    step_overhead: float


def pool(kind: KvBlocks, shape: KvShape, shared_with: Sequence[KvShape]) -> PoolUse:
    """Returns the use of a device's pool by a model of `shape`.

    A merged block is as large as the largest model's block and belongs to one request of one model.
    The memory in it that the model's blocks do not fill is lost, as is the end of a request's last
    block. Raises ValueError if heads differ in size, since neither kind shares memory between them.

    Args:
        shared_with: Shapes of all models on the device.
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
