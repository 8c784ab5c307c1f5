"""transformers' pool of sectors over kvcached blocks: a sector is a block.

The pool's free sectors are only those that it holds. transformers counts them first and allocates
later, while other clients compete for the same pages. Sectors that a step does not use are returned
before the next step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.generation.continuous_batching.cache_allocators import CachePool

from kvcached import KVCache, NoRoomError
from kvcached.engines.transformers.cache import Ids


class ElasticPool(CachePool):  # type: ignore[misc]
    """Sectors of one KV space. Thread rule: the thread that steps the batches."""

    free_sectors: list[int]
    _free_blocks: list[Any]

    def __init__(self, kv: KVCache, num_sectors: int, num_allocators: int) -> None:
        self.kv = kv
        self._taken: set[int] = set()
        super().__init__(num_sectors, num_allocators)

    def reset(self) -> None:
        """Returns all sectors to kvcached."""
        held, self._taken = sorted(self._taken), set()
        super().reset()
        self.free_sectors = []
        self._free(held)

    def hold(self, num_sectors: int, wait_s: float = 0.0) -> bool:
        """Takes the missing ones of `num_sectors` free sectors, or nothing.

        With `wait_s` other clients are asked to make room.
        """
        missing = num_sectors - len(self.free_sectors)
        ids = self.kv.alloc_kv(missing, wait_s=wait_s) if missing > 0 else np.empty(0, np.int64)
        if ids is None:
            return False
        self.free_sectors += ids.tolist()
        self._taken.update(ids.tolist())
        return True

    def hold_some(self, num_sectors: int) -> None:
        """Takes as many of `num_sectors` as fit now."""
        room = len(self.free_sectors) + self.kv.available_blocks()
        self.hold(min(num_sectors, room))

    def allocate_sector(self, index: int) -> None:
        """Allocates a held sector. Raises NoRoomError unless one is held or fits now."""
        if not self.hold(1):
            raise NoRoomError("a sector that was counted as free is no longer held")
        super().allocate_sector(index)

    def try_to_free_sectors(self) -> None:
        """Returns the sectors that hold neither a request's block nor a cached prefix."""
        super().try_to_free_sectors()
        self._taken.difference_update(self.free_sectors)
        freed, self.free_sectors = self.free_sectors, []
        self._free(freed)

    def free_blocks_of(self, index: int) -> dict[int, int]:
        """Returns the number of free blocks of each sector of an allocator."""
        return {root: len(blocks) for root, blocks in self._free_blocks[index].trees.items()}

    def _free(self, sectors: list[int]) -> None:
        if sectors:
            self.kv.free_kv(np.array(sectors, dtype=np.int64))


class CachedPrefixes:
    """Sectors that contain only cached prefixes (`kvcached.PrefixCache`)."""

    def __init__(self, pool: ElasticPool, allocators: list[Any]) -> None:
        self._pool, self._allocators = pool, allocators

    def evictable(self) -> tuple[Ids, Ids]:
        """Returns the sectors, and each one's place in the order in which they fell out of use."""
        used: dict[int, int] = {}
        for allocator in self._allocators:
            free = self._pool.free_blocks_of(allocator.index)
            for age, block in enumerate(allocator.ledger.cached_blocks):
                sector = block // allocator.blocks_per_sector
                free[sector] = free.get(sector, 0) + 1
                if free[sector] == allocator.blocks_per_sector:
                    used[sector] = age
        return np.array(list(used), np.int64), np.array(list(used.values()), np.int64)

    def evict(self, ids: Ids) -> int:
        """Drops the prefixes in these sectors. Returns their number of tokens."""
        sectors, tokens = set(ids.tolist()), 0
        for allocator in self._allocators:
            ledger = allocator.ledger
            blocks = [
                block
                for block in ledger.cached_blocks
                if block // allocator.blocks_per_sector in sectors
            ]
            for block in blocks:
                del ledger.cached_blocks[block]
                del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            self._pool.free_blocks(allocator.index, blocks)
            tokens += len(blocks) * allocator.tokens_per_page
        self._pool.try_to_free_sectors()
        return tokens

    def bytes_max(self) -> int:
        """Returns an upper bound of the evictable bytes without a walk over the sectors."""
        kv = self._pool.kv
        cached = [len(one.ledger.cached_blocks) * one.bytes_per_block for one in self._allocators]
        return int(min(sum(cached), kv.mapped_bytes() - kv.floor_bytes()))
