"""SGLang's prefix cache, told to kvcached by page (`kvcached.PrefixCache`).

SGLang's tree, in Rust by default, gives up whole leaves, the least recently used first; it can
neither be cut where a page lies nor says when a node was used last. So kvcached learns which
blocks no request uses, from which it knows what memory can come free at all; and then leaves go in
SGLang's own order, as many tokens at a time as the cheapest pages would cost, until it has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcached import KVCache
from kvcached.engines.sglang.allocator import KvcachedAllocator

_NO_BLOCKS = np.empty(0, dtype=np.int64)


class RadixPages:
    """A view of one tree for one answer."""

    def __init__(self, tree: Any, allocator: KvcachedAllocator) -> None:
        self._tree = tree
        self._allocator = allocator

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Blocks that no running request holds a lock on. All count as used at one time."""
        core = getattr(self._tree, "tree_core", None)
        if core is None:  # the radix cache is switched off
            return _NO_BLOCKS, _NO_BLOCKS
        walk = core.walk_for_kv_canary(True, False)
        slots = np.asarray(walk.slot_indices, dtype=np.int64)
        page_tokens = int(self._allocator.page_size)
        blocks = slots[slots % page_tokens == 0] // page_tokens
        return blocks, np.zeros_like(blocks)

    def evict(self, ids: NDArray[np.int64]) -> int:
        """Leaves of about as many tokens as these blocks have."""
        return self._allocator.evict_cache(self._tree, len(ids) * int(self._allocator.page_size))

    def evictable_bytes_max(self, kv: KVCache) -> int:
        """An upper bound, at no cost: which pages the cache shares with requests is looked at when
        it matters."""
        bound_bytes = kv.mapped_bytes() - kv.floor_bytes()
        tokens = int(self._tree.evictable_size())
        return max(0, min(tokens * kv.layout.token_bytes, bound_bytes))
