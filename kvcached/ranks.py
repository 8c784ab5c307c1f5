"""KV caches of the ranks of a tensor-parallel group, in lockstep (Prism §5.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcached.balloon import Shrunk
from kvcached.checks import checked, function, instance_of, not_negative, optional
from kvcached.errors import KvcachedError
from kvcached.kvcache import KVCache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]


class RankKV:
    """One rank's KV cache in a tensor-parallel group: every rank gets its blocks, or none does.

    Each rank allocates on its own device and all ranks vote. If one device has no room, or one rank
    fails, every rank gives back the blocks it took. So no kernel runs on some ranks for blocks
    whose pages another rank lacks. Ids may differ between ranks, which suits engines that schedule
    on every rank.

    `all_true(ok)` returns whether every rank passed True: a collective of the engine's group, such
    as a minimum over all ranks. All ranks make the same calls of `alloc_kv` in the same order, as
    with any collective. Used from the cache's thread.
    """

    @checked(kv=instance_of(KVCache), all_true=function)
    def __init__(self, kv: KVCache, all_true: Callable[[bool], bool]) -> None:
        self.kv = kv
        self._all_true = all_true

    def alloc_kv(self, num_blocks: int) -> Ids | None:
        """Allocates blocks on all ranks. Returns this rank's ids (int64), or None on all ranks.

        Each call votes once, in every case. A rank whose cache raises votes no before it raises, so
        that no rank waits for it; the other ranks return None. If the vote itself raises, this
        rank's blocks are freed.
        """
        return self._agree(self._own(num_blocks))

    def agree(self, ids: Ids | None) -> Ids | None:
        """Votes once, as `alloc_kv` does, on blocks that this rank has allocated in another way.

        `ids` are this rank's new blocks, None if it has no room. Returns them if every rank passes
        some. Otherwise frees them, and returns None. Raises the errors of `KVCache.free_kv`, after
        it has voted no.
        """
        if ids is not None:
            try:
                self.kv.check_free(ids)
            except KvcachedError:
                self._all_true(False)
                raise
        return self._agree(ids)

    def _agree(self, ids: Ids | None) -> Ids | None:
        agreed = False
        try:
            agreed = self._all_true(ids is not None)
        finally:
            if ids is not None and not agreed:
                self.kv.free_kv(ids)
        return ids if agreed else None

    def free_kv(self, ids: Ids) -> None:
        """Frees blocks of this rank, without a vote. Raises the errors of `KVCache.free_kv`."""
        self.kv.free_kv(ids)

    @checked(size_bytes=optional(not_negative), evict=function)
    def shrink(self, size_bytes: int | None, evict: Callable[[int | None], int]) -> Shrunk:
        """Gives memory back on this rank, by evicting the same tokens as every other rank.

        Block ids, and so pages, differ between ranks, but prefix caches must not. So `evict` gets a
        number of tokens (None: all it can) computed from `size_bytes` alone, and returns how many
        it evicted. Pages without a live block are returned after that. All ranks call this with the
        same `size_bytes`, without a vote.
        """
        # Of the client: `evict` may also free blocks of other pools, such as that of windows.
        held_bytes = self.kv._committed_bytes()
        tokens = None if size_bytes is None else -(-size_bytes // self.kv.layout.token_bytes)
        spare_bytes = max(0, held_bytes - self.kv._trimmed_bytes())
        evicted_tokens = evict(tokens)
        returned_bytes = max(0, held_bytes - self.kv._trimmed_bytes())
        return Shrunk(returned_bytes, evicted_tokens, max(0, returned_bytes - spare_bytes))

    def _own(self, num_blocks: int) -> Ids | None:
        try:
            return self.kv.alloc_kv(num_blocks)
        except KvcachedError:
            self._all_true(False)
            raise
