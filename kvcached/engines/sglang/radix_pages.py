"""SGLang's prefix cache as a `kvcached.PrefixCache`, which is evicted by page.

SGLang's tree, in Rust by default, evicts whole leaves, the least recently used first. It cannot be
cut at a page's boundary and does not show when a node was last used. So kvcached learns which
blocks no request uses, and from them how much memory can be freed. Leaves are then evicted in
SGLang's order, as many tokens at a time as the cheapest pages would cost, until enough is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcached import KVCache
from kvcached.engines.sglang.allocator import KvcachedAllocator
from kvcached.engines.sglang.hybrid.windows import KvcachedWindowAllocator

_NO_BLOCKS = np.empty(0, dtype=np.int64)


class RadixPages:
    """View of one tree, for one answer."""

    def __init__(self, tree: Any, allocator: KvcachedAllocator | KvcachedWindowAllocator) -> None:
        self._tree = tree
        self._allocator = allocator

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the blocks that no running request has locked, all with the same time of last
        use.
        """
        core = getattr(self._tree, "tree_core", None)
        if core is None:  # the radix cache is switched off
            return _NO_BLOCKS, _NO_BLOCKS
        walk = core.walk_for_kv_canary(True, False)
        slots = np.asarray(walk.slot_indices, dtype=np.int64)
        page_tokens = int(self._allocator.page_size)
        blocks = slots[slots % page_tokens == 0] // page_tokens
        return blocks, np.zeros_like(blocks)

    def evict(self, ids: NDArray[np.int64]) -> int:
        """Evicts leaves with about as many tokens as these blocks have."""
        return self._allocator.evict_cache(self._tree, len(ids) * int(self._allocator.page_size))

    def evictable_bytes_max(self, kv: KVCache) -> int:
        """Returns an upper bound without a walk over the tree.

        It ignores which pages the cache shares with requests; evictions determine that.
        """
        found_bytes = _bytes_max(kv, self._tree.evictable_size())
        if isinstance(self._allocator, KvcachedWindowAllocator):
            window = self._allocator.swa_attn_allocator.kv
            found_bytes += _bytes_max(window, self._tree.swa_evictable_size())
        return found_bytes


def _bytes_max(kv: KVCache, tokens: int) -> int:
    """Returns the bytes of these tokens, at most those that are mapped above the floor."""
    return max(0, min(int(tokens) * kv.layout.token_bytes, kv.mapped_bytes() - kv.floor_bytes()))
