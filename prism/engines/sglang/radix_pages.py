"""SGLang's radix cache, told to kvcached by page (`kvcached.PrefixCache`).

The tree gives up whole leaves, the least recently used first, wherever their blocks lie. Memory
comes back only with the last block of a slab, so kvcached chooses slabs, and here the prefixes are
cut where the chosen blocks are: what follows a missing block is worth nothing and goes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode


class RadixPages:
    """A view of one tree for one answer. Blocks that a running request shares are not in it: its
    path through the tree is locked."""

    def __init__(self, tree: RadixCache, allocator: Any) -> None:
        self._tree = tree
        self._allocator = allocator
        self._page_tokens = int(allocator.page_size)

    def evictable(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Times are in nanoseconds, of the last request that passed through a node."""
        nodes = list(self._unlocked())
        if not nodes:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        blocks = [self._blocks_of(node) for node in nodes]
        times = [int(node.last_access_time * 1e9) for node in nodes]
        return np.concatenate(blocks), np.repeat(times, [len(each) for each in blocks])

    def evict(self, ids: NDArray[np.int64]) -> int:
        """Cuts every node at the first of these blocks in it."""
        evicted_tokens = 0
        for node in list(self._unlocked()):
            chosen = np.flatnonzero(np.isin(self._blocks_of(node), ids))
            if len(chosen) and self._is_in_tree(node):
                evicted_tokens += self._cut(node, int(chosen[0]) * self._page_tokens)
        return evicted_tokens

    def _unlocked(self) -> Iterator[TreeNode]:
        """Parents before children. A lock holds the whole path to the root."""
        nodes = [self._tree.root_node]
        while nodes:
            node = nodes.pop()
            if node.lock_ref == 0 and node is not self._tree.root_node:
                yield node
            nodes += node.children.values()

    def _blocks_of(self, node: TreeNode) -> NDArray[np.int64]:
        slots: NDArray[np.int64] = node.value[:: self._page_tokens].numpy()
        return slots // self._page_tokens

    def _is_in_tree(self, node: TreeNode) -> bool:
        """Not gone with a node above it."""
        key = node.key.child_key(self._tree.page_size)
        return node.parent.children.get(key) is node

    def _cut(self, node: TreeNode, keep_tokens: int) -> int:
        """Keeps the first tokens of a node, and frees the others with all that follows them."""
        if keep_tokens > 0:
            self._tree._split_node(node.key, node, keep_tokens)
        evicted_tokens = 0
        for child in list(node.children.values()):
            evicted_tokens += self._cut(child, 0)
        self._allocator.free_segment(node.value, start_pos=0)
        self._tree._delete_leaf(node)
        self._tree.kv_events.record_remove(node)
        return evicted_tokens + len(node.value)
