"""Cost of sharing a pool of KV blocks: SeaLLM's and MuxServe's own examples."""

from __future__ import annotations

import pytest

from prism.policies.multiplexing.kv_blocks import STEP_OVERHEAD, KvBlocks, KvShape, pool

LLAMA_7B = KvShape(layers=32, kv_heads=32, head_dim=128)
LLAMA_13B = KvShape(layers=40, kv_heads=40, head_dim=128)
LLAMA_70B = KvShape(layers=80, kv_heads=8, head_dim=128)


def test_sizes_of_llama() -> None:
    """Checks SeaLLM §2.3: 8,192 tokens of Llama2-7B take 4 GB."""
    assert LLAMA_7B.block_bytes // 16 == 524_288
    assert LLAMA_7B.block_bytes * 8192 // 16 == 4 * 2**30


def test_split_blocks_waste_nothing() -> None:
    split = pool(KvBlocks.HEADWISE, LLAMA_7B, [LLAMA_7B, LLAMA_13B])
    assert (split.grain_bytes, split.grain_tokens) == (LLAMA_7B.block_bytes, 16)


def test_a_merged_block_holds_whole_blocks_of_the_smaller_model() -> None:
    large = KvShape(layers=64, kv_heads=32, head_dim=128)
    small = pool(KvBlocks.MERGED, LLAMA_7B, [LLAMA_7B, large])
    assert (small.grain_bytes, small.grain_tokens) == (large.block_bytes, 32)
    assert pool(KvBlocks.MERGED, large, [LLAMA_7B, large]).grain_tokens == 16


def test_what_does_not_fill_a_merged_block_is_lost() -> None:
    """Checks that one 7B block in a 13B-sized one wastes 36 % of it."""
    merged = pool(KvBlocks.MERGED, LLAMA_7B, [LLAMA_7B, LLAMA_13B])
    assert merged.grain_tokens == 16
    assert LLAMA_7B.block_bytes / merged.grain_bytes == pytest.approx(0.64)


def test_alone_nothing_is_lost() -> None:
    for kind in KvBlocks:
        own = pool(kind, LLAMA_7B, [LLAMA_7B])
        assert (own.grain_bytes, own.step_overhead) == (LLAMA_7B.block_bytes, 0.0)


def test_only_shared_pools_cost_time() -> None:
    for kind in KvBlocks:
        assert pool(kind, LLAMA_7B, [LLAMA_7B, LLAMA_13B]).step_overhead == STEP_OVERHEAD


def test_heads_must_be_alike() -> None:
    odd = KvShape(layers=32, kv_heads=32, head_dim=80)
    with pytest.raises(ValueError, match=r"heads of \[5120, 8192\] bytes"):
        pool(KvBlocks.MERGED, LLAMA_7B, [LLAMA_7B, odd])
    assert pool(KvBlocks.HEADWISE, LLAMA_70B, [LLAMA_7B, LLAMA_70B]).grain_tokens == 16
