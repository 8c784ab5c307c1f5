"""The KV cache of a hybrid model: a pool for each group of layers, on one client's budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcached.asking import MemoryRequest, Requester, wait_for
from kvcached.balloon import PrefixCache, Shrunk
from kvcached.checks import by_name, checked, has, instance_of, not_negative, patience
from kvcached.errors import InvalidArgumentError
from kvcached.kvcache import KVCache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    import kvcached._core as _core
    from kvcached.layouts import HybridLayout

_mapping = instance_of(Mapping)


class KVCacheGroup:
    """Made by `Client.alloc_kvcache` from a `HybridLayout`; used from one thread.

    Each group of layers has block ids of its own, and all take pages from the same client: one
    record, one limit, one minimum, and the spare pages of one go to another that has no room. So
    memory that a window leaves behind is the full attention's in the next step.
    """

    def __init__(
        self,
        requester: Requester,
        page_bytes: int,
        layout: HybridLayout,
        num_tokens: int,
        reserved_blocks: int,
    ) -> None:
        self.layout = layout
        self._requester = requester
        self._page_bytes = page_bytes
        self.pools: dict[str, KVCache] = {}
        try:
            for group in layout.groups:
                self.pools[group.name] = KVCache(
                    requester, page_bytes, group.layout, num_tokens, reserved_blocks
                )
        except BaseException:
            self._free()
            raise
        self._places = {
            layer: (self.pools[group.name], index)
            for group in layout.groups
            for index, layer in enumerate(group.layers)
        }

    def __repr__(self) -> str:
        return f"KVCacheGroup({', '.join(f'{name}: {pool}' for name, pool in self.pools.items())})"

    def __getitem__(self, name: str) -> KVCache:
        """The pool of a group: its views, counters and watermarks. Layers count from 0 in it."""
        return self.pools[self.layout.group(name).name]

    def buffer(self, layer: int, part: str) -> _core.TensorView:
        """`KVCache.buffer` of one of the model's layers."""
        pool, index = self._place(layer)
        return pool.buffer(index, part)

    def blocks(self, layer: int, part: str) -> _core.TensorView:
        """`KVCache.blocks` of one of the model's layers."""
        pool, index = self._place(layer)
        return pool.blocks(index, part)

    def alloc_kv(
        self, num_blocks: Mapping[str, int], *, wait_s: float = 0.0
    ) -> dict[str, NDArray[np.int64]] | None:
        """Blocks of several groups at once, by name; None if there is no room for all of them now.

        All or nothing: a failure, of the driver too, leaves every group the blocks it had. `wait_s`
        as in `KVCache.alloc_kv`.
        """
        patience("wait_s", wait_s)
        taken = self._take(num_blocks)
        if taken is not None or wait_s == 0:
            return taken
        request = MemoryRequest(self._requester, lambda: self._missing_bytes(num_blocks))
        return wait_for(request, lambda: self._take(num_blocks), wait_s)

    def _take(self, num_blocks: Mapping[str, int]) -> dict[str, NDArray[np.int64]] | None:
        missing = self._missing_pages(num_blocks)
        if missing is None or not self._find_room(missing):
            return None
        taken: dict[str, NDArray[np.int64]] = {}
        try:
            # Those that need pages first: the others have what they need.
            for name in sorted(num_blocks, key=lambda name: missing[name] == 0):
                ids = self.pools[name].alloc_kv(num_blocks[name])
                if ids is None:
                    return None
                taken[name] = ids
            return taken
        finally:
            if len(taken) < len(num_blocks):
                self.free_kv(taken)

    def free_kv(self, ids: Mapping[str, NDArray[np.int64]]) -> None:
        """Frees blocks of one or several groups, by name: all of them or, with an error, none.

        Blocks that a window has left behind go alone: {"window": ids}.
        """
        for name, blocks in _mapping("ids", ids).items():
            self[name].check_free(blocks)
        for name, blocks in ids.items():
            self.pools[name].free_kv(blocks)

    def can_alloc(self, num_blocks: Mapping[str, int]) -> bool:
        """Whether alloc_kv would succeed now; other clients may change that at any time.

        Spare pages of this client's other caches are not counted.
        """
        missing_bytes = self._missing_bytes(num_blocks)
        return missing_bytes is not None and missing_bytes <= self._requester.core.available_bytes()

    def live_blocks(self) -> dict[str, int]:
        """Blocks that are allocated, by group, reserved ones not counted."""
        return {name: pool.live_blocks() for name, pool in self.pools.items()}

    def mapped_bytes(self) -> int:
        """Bytes of mapped pages of all groups."""
        return sum(pool.mapped_bytes() for pool in self.pools.values())

    def floor_bytes(self) -> int:
        """Bytes that stay mapped when no block is live: the slabs of the reserved blocks."""
        return sum(pool.floor_bytes() for pool in self.pools.values())

    def trim(self) -> int:
        """Gives every page without a live block back now. Returns how many pages went."""
        return sum(pool.trim() for pool in self.pools.values())

    @checked(size_bytes=not_negative, caches=by_name(has("evictable", "evict")))
    def shrink(
        self, size_bytes: int | None = None, caches: Mapping[str, PrefixCache] | None = None
    ) -> Shrunk:
        """`KVCache.shrink` over all groups: their spare pages first, then pages of prefix caches.

        `caches` are those of the groups that have one, by name; the first named gives first.
        """
        shrunk = Shrunk()
        for pool in self.pools.values():
            shrunk += pool.shrink(0)
        for name, cache in (caches or {}).items():
            left_bytes = None if size_bytes is None else size_bytes - shrunk.returned_bytes
            if left_bytes is None or left_bytes > 0:
                shrunk += self[name].shrink(left_bytes, cache)
        return shrunk

    def check_integrity(self) -> None:
        """Recounts the books of every group; raises InternalError if they do not add up."""
        for pool in self.pools.values():
            pool.check_integrity()

    def _place(self, layer: int) -> tuple[KVCache, int]:
        if not_negative("layer", layer) not in self._places:
            raise InvalidArgumentError(f"layer {layer} is not in 0..{len(self._places) - 1}")
        return self._places[layer]

    def _missing_pages(self, num_blocks: Mapping[str, int]) -> dict[str, int] | None:
        """`KVCache.missing_pages` of each group; None if one of them answers that."""
        missing: dict[str, int] = {}
        for name, count in _mapping("num_blocks", num_blocks).items():
            pages = self[name].missing_pages(count)
            if pages is None:
                return None
            missing[name] = pages
        return missing

    def _missing_bytes(self, num_blocks: Mapping[str, int]) -> int | None:
        missing = self._missing_pages(num_blocks)
        return None if missing is None else sum(missing.values()) * self._page_bytes

    def _find_room(self, missing: Mapping[str, int]) -> bool:
        """Asks the ledger for the sum first, so that a refusal costs no driver call."""
        asking = [name for name, pages in missing.items() if pages]
        if len(asking) <= 1:
            return True
        return self.pools[asking[0]].find_room(sum(missing.values()))

    def _free(self) -> None:
        for pool in self.pools.values():
            pool._free()
