"""Compares our block pool with vLLM's in a long random run. Run by vLLM's interpreter.

    python pools.py SEED

While there is room for both, their answers are equal: they find the same prefixes. Then other
clients take memory in between, and the accounts must add up.
"""

from __future__ import annotations

import random
import sys
from typing import Any
from uuid import uuid4

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvcached import Device
from kvcached.engines.device_share import DeviceShare
from kvcached.engines.settings import Settings
from kvcached.engines.vllm import memory
from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.layouts import PackedLayout

PAGE, BLOCK_TOKENS = 64 << 10, 16
LAYOUT = PackedLayout(
    dtype="int8",
    block_tokens=BLOCK_TOKENS,
    arrangement="block_interleaved",
    packed_token_bytes=1 << 10,
)  # four blocks to a page
BLOCKS, STEPS = 160, 4000
SIZE = BLOCKS * BLOCK_TOKENS * LAYOUT.token_bytes


class Both:
    """The two pools, and requests that hold blocks of both."""

    def __init__(self, pool: ElasticBlockPool, seed: int) -> None:
        sizes = {"num_gpu_blocks": BLOCKS, "enable_caching": True, "hash_block_size": BLOCK_TOKENS}
        self.pools: tuple[Any, Any] = (pool, BlockPool(**sizes))
        self.chance = random.Random(seed)
        self.requests: list[tuple[list[Any], list[Any]]] = []
        self.hashes: list[bytes] = []

    def step(self) -> None:
        move = self.chance.choice((self.grow, self.grow, self.hit, self.finish))
        move()
        ours = self.pools[0]
        ours.return_held_blocks()
        used = {block.block_id for request in self.requests for block in request[0]}
        free = [block.block_id for block in ours.free_block_queue.get_all_free_blocks()]
        assert not used & set(free)
        assert ours.kv.live_blocks() == len(used) + len(free)
        assert all(ours.blocks[block].block_hash for block in free)

    def grow(self) -> None:
        count = self.chance.randint(1, 12)
        self.pools[0].hold(count)
        if any(pool.get_num_free_blocks() < count for pool in self.pools):
            return
        blocks: tuple[list[Any], list[Any]] = ([], [])
        keys = [self.chance.randbytes(32) for _ in range(self.chance.randint(0, count))]
        for pool, mine in zip(self.pools, blocks, strict=True):
            mine.extend(pool.get_new_blocks(count))
            for block, key in zip(mine, keys, strict=False):
                pool._insert_block_hash(make_block_hash_with_group_id(key, 0), block, BLOCK_TOKENS)
        self.hashes += keys
        self.requests.append(blocks)

    def found(self, key: bytes) -> tuple[list[Any] | None, list[Any] | None]:
        ours, stock = (pool.get_cached_block(key, [0]) for pool in self.pools)
        return ours, stock

    def hit(self) -> None:
        ours, stock = self.found(self.chance.choice(self.hashes)) if self.hashes else (None, None)
        if ours and stock:
            for pool, blocks in zip(self.pools, (ours, stock), strict=True):
                pool.touch(blocks)
            self.requests.append((ours, stock))

    def finish(self) -> None:
        if self.requests:
            blocks = self.requests.pop(self.chance.randrange(len(self.requests)))
            for pool, mine in zip(self.pools, blocks, strict=True):
                pool.free_blocks(reversed(mine))


def same_prefixes_are_found(both: Both) -> None:
    for _ in range(STEPS):
        both.step()
    found = [both.found(key) for key in both.hashes]
    assert [ours is None for ours, _ in found] == [stock is None for _, stock in found]
    assert any(ours for ours, _ in found)
    assert not all(ours for ours, _ in found)


def books_add_up_while_others_ask(both: Both) -> None:
    pool, evicted_tokens = both.pools[0], 0
    for number in range(STEPS):
        both.step()
        if number % 20 == 0:
            evicted_tokens += pool.kv.shrink(both.chance.randrange(SIZE // 4), pool).evicted_tokens
    assert evicted_tokens > 0
    while both.requests:
        both.finish()
    assert pool.reset_prefix_cache()
    pool.return_held_blocks()
    pool.kv.trim()
    assert pool.kv.live_blocks() == 0
    assert pool.kv.mapped_bytes() == pool.kv.floor_bytes()
    pool.kv.check_integrity()


def main() -> None:
    namespace = f"t{uuid4().hex[:10]}"
    settings = Settings("host:0", namespace, capacity_bytes=2 * SIZE, page_bytes=PAGE)
    opened = memory.EngineMemory.__new__(memory.EngineMemory)
    opened.share = DeviceShare(settings, "pool")
    opened.kv = opened.share.alloc_kvcache(LAYOUT, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS)
    memory._active = opened
    try:
        sizes = {"num_gpu_blocks": BLOCKS, "enable_caching": True, "hash_block_size": BLOCK_TOKENS}
        both = Both(ElasticBlockPool(**sizes), int(sys.argv[1]))
        same_prefixes_are_found(both)
        books_add_up_while_others_ask(both)
    finally:
        Device.unlink(namespace, "host:0", force=True)


if __name__ == "__main__":
    main()
