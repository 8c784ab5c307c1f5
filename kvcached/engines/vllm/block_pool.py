"""vLLM's block pool over kvcached blocks.

vLLM's queue of free blocks contains only blocks that have memory. Its head has blocks taken from
kvcached for the step that is being planned; its tail has cached prefixes that no request uses. vLLM
first asks whether there is room and allocates later, while other engines compete for the same
pages, so only held blocks are safe. Blocks that a step does not use are returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.block_pool import BlockPool

from kvcached import KVCache, Shrunk
from kvcached.engines.vllm.memory import Share, active_memory

Ids = NDArray[np.int64]


class ElasticBlockPool(BlockPool):  # type: ignore[misc]
    """Block pool that is also the engine's `kvcached.PrefixCache`.

    Raises RuntimeError without the worker's memory.
    """

    num_gpu_blocks: int
    free_block_queue: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        memory = active_memory()
        if memory.kv is None or memory.kv.num_blocks != self.num_gpu_blocks:
            raise RuntimeError("vLLM's scheduler and worker do not have the same blocks")
        self.kv: KVCache = memory.kv
        self._share: Share = memory.share
        layout = self.kv.layout
        self._block_bytes = layout.block_tokens * layout.buffer_token_bytes[0]
        self._floor_bytes = self.kv.floor_bytes()
        self.free_block_queue.popleft_n(self.free_block_queue.num_free_blocks)

    # --- blocks of a step --------------------------------------------------------------------

    def hold(self, num_blocks: int) -> int:
        """Takes the blocks that the queue needs for `num_blocks` from kvcached, as far as they fit.

        Returns how many are missing, with cached blocks counted as available.
        """
        missing = num_blocks - self._held()
        while missing > 0:
            count = min(missing, self.kv.available_blocks())
            if count == 0 or self._take(self.kv.alloc_kv(count)):
                break
        return max(0, num_blocks - int(self.free_block_queue.num_free_blocks))

    def find(self, num_blocks: int) -> None:
        """Takes `num_blocks` for which other engines make room shortly, or none."""
        self._take(self._share.find_room(self.kv, num_blocks))

    def ask_for(self, num_blocks: int, more_blocks: int) -> None:
        """Asks others for room for `num_blocks`, and for `more_blocks` if possible. Returns at
        once.
        """
        self._share.ask_for(num_blocks * self._block_bytes, more_blocks * self._block_bytes)

    def return_held_blocks(self) -> None:
        """Frees the blocks that no request uses and that hold no prefix."""
        count = self._held()
        if count:
            self._free(self.free_block_queue.popleft_n(count))

    def _held(self) -> int:
        """Returns the number of blocks at the queue's head that hold no prefix."""
        queue, count = self.free_block_queue, 0
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail and block.block_hash is None:
            block, count = block.next_free_block, count + 1
        return count

    def _take(self, ids: Ids | None) -> bool:
        if ids is None:
            return False
        self.free_block_queue.prepend_n([self.blocks[block] for block in ids.tolist()])
        return True

    def _free(self, blocks: list[Any]) -> None:
        self.kv.free_kv(np.array([block.block_id for block in blocks], dtype=np.int64))

    # --- the prefix cache --------------------------------------------------------------------

    def evictable(self) -> tuple[Ids, Ids]:
        """Returns the blocks in the queue, in the order in which vLLM would reuse them."""
        blocks = self.free_block_queue.get_all_free_blocks()
        ids = np.array([block.block_id for block in blocks], dtype=np.int64)
        return ids, np.arange(len(ids), dtype=np.int64)

    def evict(self, ids: Ids) -> int:
        """Drops the contents of these blocks. Returns their number of tokens."""
        blocks = [self.blocks[block] for block in ids.tolist()]
        self.evict_blocks({block.block_id for block in blocks})
        for block in blocks:
            self.free_block_queue.remove(block)
        self._free(blocks)
        return len(blocks) * int(self.kv.layout.block_tokens)

    def evictable_bytes_max(self) -> int:
        """Returns an upper bound without a walk over the blocks.

        It ignores which pages the cache shares with requests; evictions determine that.
        """
        bound_bytes = self.kv.mapped_bytes() - self._floor_bytes
        return int(min(self.free_block_queue.num_free_blocks * self._block_bytes, bound_bytes))

    def shrink(self, size_bytes: int | None) -> Shrunk:
        """Gives memory to others: first pages without a live block, then cached prefixes."""
        return self.kv.shrink(size_bytes, self)

    # --- methods of vLLM that count all blocks of the pool as real -------------------------------

    def reset_prefix_cache(self) -> bool:
        everything, self.num_gpu_blocks = self.num_gpu_blocks, self.kv.live_blocks() + 1
        try:
            return bool(super().reset_prefix_cache())
        finally:
            self.num_gpu_blocks = everything

    def get_usage(self) -> float:
        used = self.kv.live_blocks() - self.free_block_queue.num_free_blocks
        return float(used / max(1, self.num_gpu_blocks - 1))
