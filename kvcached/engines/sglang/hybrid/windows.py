"""Allocator of models with sliding windows in some layers: two pools, each with separate blocks.

SGLang allocates a block of each pool for the same tokens. It frees those of the window pool once no
later token attends to them, so a long sequence holds little more there than its window.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.utils import get_num_new_pages

from kvcached import KVCache
from kvcached.engines.sglang.allocator import KvcachedAllocator
from kvcached.engines.sglang.budget import BlockReserver
from kvcached.engines.sglang.memory import active_memory


class KvcachedWindowAllocator(BlockReserver, SWATokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's allocator of two pools, each of which is a `KvcachedAllocator`."""

    full_attn_allocator: KvcachedAllocator
    swa_attn_allocator: KvcachedAllocator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory = active_memory()
        # kvcached lays out whole slabs, which may have more blocks than SGLang counts.
        tokens = self.full_attn_allocator.kv.num_tokens
        mapping = torch.zeros(tokens + 1, dtype=torch.int64, device=self.device)
        mapping[-1] = -1  # of a token without a predecessor
        self.full_to_swa_index_mapping = mapping
        self.get_kvcache().register_mapping(mapping)

    @property
    def kv(self) -> KVCache:
        """KV of the layers without a window."""
        return self.full_attn_allocator.kv

    @property
    def pools(self) -> tuple[KvcachedAllocator, ...]:
        """Allocators of both pools."""
        return (self.full_attn_allocator, self.swa_attn_allocator)

    # --- available memory ------------------------------------------------------------------

    def attainable_tokens(self) -> int:
        """Returns the tokens without a window that fit now without evicting. Memory that only the
        window pool has mapped counts in proportion."""
        window = self.swa_attn_allocator
        mapped = window.kv.free_mapped_blocks() + len(window.free_pages)
        mapped_tokens = mapped * self.page_size * window.kv.layout.token_bytes
        full = self.full_attn_allocator
        return full.attainable_tokens() + mapped_tokens // full.kv.layout.token_bytes

    def window_tokens(self, num_tokens: int, tree_cache: Any) -> int:
        """Returns the tokens without a window that take as much memory as the window pool needs for
        a request of `num_tokens`."""
        window, full = self.swa_attn_allocator.kv.layout, self.full_attn_allocator.kv.layout
        kept = min(num_tokens, int(tree_cache.sliding_window_size) + self.page_size)
        return -(-kept * window.token_bytes // full.token_bytes)

    def reserve_blocks(self, pages: int, tree_cache: Any) -> bool:
        """Holds `pages` blocks of both pools, evicting own prefix cache when the device is full."""
        return all(pool.reserve_blocks(pages, tree_cache, self.evict_cache) for pool in self.pools)

    def reserve_states(self, requests: int) -> bool:
        """Returns True: these models keep no state."""
        return True

    def return_held_blocks(self) -> None:
        """Frees the blocks that the last step did not use."""
        for pool in self.pools:
            pool.return_held_blocks()

    def evict_cache(self, tree_cache: Any, tokens: int | None) -> int:
        """Evicts about `tokens` (None: all) of unused prefix cache, least recently used first."""
        if tokens is None:
            tokens = int(tree_cache.full_evictable_size())
        result = tree_cache.evict_for_alloc(EvictParams(num_tokens=tokens, swa_num_tokens=tokens))
        return max(int(result.num_tokens_evicted), int(result.swa_num_tokens_evicted))

    # --- allocation ------------------------------------------------------------------------

    def new_pages_available(self, num_full_pages: int, num_swa_pages: int) -> bool:
        return all(
            pool.reserve_blocks(pages, pool.tree_cache, self.evict_cache)
            for pool, pages in zip(self.pools, (num_full_pages, num_swa_pages), strict=True)
        )

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Returns None: KV that comes from elsewhere lacks what is outside of the windows."""
        return None

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self.new_pages_available(pages, pages):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
