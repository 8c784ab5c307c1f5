"""KV cache of a hybrid model: one pool for each group of layers, all within one client's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcached.balloon import PrefixCache, Shrunk
from kvcached.checks import by_name, checked, duration, has, instance_of, not_negative
from kvcached.errors import InvalidArgumentError
from kvcached.kvcache import KVCache
from kvcached.memory_requests import MemoryRequest, Requester, wait_for

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    import kvcached._core as _core
    from kvcached.layouts import HybridLayout

_mapping = instance_of(Mapping)


class KVCacheGroup:
    """KV cache of a `HybridLayout`, made by `Client.alloc_kvcache`; used from one thread.

    Each group of layers has separate block ids. All groups take pages from the same client: one
    record, one limit, one minimum, and spare pages of one group go to another that has no room. So
    memory that a sliding window frees is available to full attention in the next step.
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
        """Returns the pool of a group, with its views and counters. Its layers count from 0."""
        return self.pools[self.layout.group(name).name]

    def buffer(self, layer: int, part: str) -> _core.TensorView:
        """Returns `KVCache.buffer` of one of the model's layers."""
        pool, index = self._place(layer)
        return pool.buffer(index, part)

    def blocks(self, layer: int, part: str) -> _core.TensorView:
        """Returns `KVCache.blocks` of one of the model's layers."""
        pool, index = self._place(layer)
        return pool.blocks(index, part)

    def alloc_kv(
        self, num_blocks: Mapping[str, int], *, wait_s: float = 0.0
    ) -> dict[str, NDArray[np.int64]] | None:
        """Allocates blocks of several groups, by name. Returns None if they do not all fit now.

        All or nothing: on any failure, also of the driver, every group keeps exactly the blocks it
        had. `wait_s` as in `KVCache.alloc_kv`.
        """
        duration("wait_s", wait_s)
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
            # Groups that need pages first: the others cannot fail.
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

        Blocks outside of a sliding window are freed on their own: {"window": ids}.
        """
        for name, blocks in _mapping("ids", ids).items():
            self[name].check_free(blocks)
        for name, blocks in ids.items():
            self.pools[name].free_kv(blocks)

    def can_alloc(self, num_blocks: Mapping[str, int]) -> bool:
        """Returns whether alloc_kv would succeed now. Other clients may change that at any time.

        Spare pages of this client's other caches are not counted.
        """
        missing_bytes = self._missing_bytes(num_blocks)
        return missing_bytes is not None and missing_bytes <= self._requester.core.available_bytes()

    def live_blocks(self) -> dict[str, int]:
        """Returns the number of allocated blocks by group, without reserved ones."""
        return {name: pool.live_blocks() for name, pool in self.pools.items()}

    def mapped_bytes(self) -> int:
        """Returns the bytes of mapped pages of all groups."""
        return sum(pool.mapped_bytes() for pool in self.pools.values())

    def floor_bytes(self) -> int:
        """Returns the bytes mapped without live blocks: the slabs of the reserved blocks."""
        return sum(pool.floor_bytes() for pool in self.pools.values())

    def trim(self) -> int:
        """Returns every page without a live block to the device. Returns the number of pages."""
        return sum(pool.trim() for pool in self.pools.values())

    @checked(size_bytes=not_negative, caches=by_name(has("evictable", "evict")))
    def shrink(
        self, size_bytes: int | None = None, caches: Mapping[str, PrefixCache] | None = None
    ) -> Shrunk:
        """Applies `KVCache.shrink` to all groups: spare pages first, then pages of prefix caches.

        `caches` are the groups' prefix caches by name, in the order in which they give pages.
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
        """Recounts the books of every group. Raises InternalError if they do not add up."""
        for pool in self.pools.values():
            pool.check_integrity()

    def _place(self, layer: int) -> tuple[KVCache, int]:
        if not_negative("layer", layer) not in self._places:
            raise InvalidArgumentError(f"layer {layer} is not in 0..{len(self._places) - 1}")
        return self._places[layer]

    def _missing_pages(self, num_blocks: Mapping[str, int]) -> dict[str, int] | None:
        """Returns `KVCache.missing_pages` of each group, or None if one of them returns None."""
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
