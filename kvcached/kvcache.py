"""KV cache of one model: blocks of tokens on pages mapped on demand (Prism §5.2, Table 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvcached._core as _core
from kvcached.balloon import PrefixCache, Shrunk
from kvcached.checks import checked, duration, has, not_negative, shown, text
from kvcached.errors import DoubleFreeError, HandoverError, InvalidArgumentError
from kvcached.handover.plan import LocalCache, Shape
from kvcached.memory_requests import MemoryRequest, Requester, wait_for
from kvcached.usage import Fragmentation, KVCounters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcached.handover.offer import Offer
    from kvcached.handover.offers import Offers
    from kvcached.layouts import KVLayout, TensorPlacement

_WRONG_IDS = "ids must be a 1-D int64 array on the CPU"

_EVERYTHING = 2**63 - 1
_AT_ONCE = 0.0  # compared by identity, so that a call without `wait_s` skips the check


class KVCache:
    """KV cache made by `Client.alloc_kvcache`; used from one thread.

    Another thread of kvcached may map spare pages. Block b holds the tokens from b * block_tokens
    on, in every buffer. Blocks below `reserved_blocks` are never allocated and always mapped, and
    hold zeros at first, so padding may be written to and read from them.
    """

    def __init__(
        self,
        requester: Requester,
        page_bytes: int,
        layout: KVLayout,
        num_tokens: int,
        reserved_blocks: int,
    ) -> None:
        slab_tokens = layout.slab_tokens(page_bytes)
        slabs = -(-num_tokens // slab_tokens)
        slab_pages = layout.slab_pages(page_bytes)
        blocks_per_slab = slab_tokens // layout.block_tokens
        size_bytes = slabs * sum(slab_pages) * page_bytes
        if max(slabs, blocks_per_slab) >= 2**32 or size_bytes >= 2**63:
            raise InvalidArgumentError(f"num_tokens {num_tokens} is too large; ask for less")
        self.layout = layout
        self.num_tokens = slabs * slab_tokens
        self._requester = requester
        self._page_bytes = page_bytes
        self._core = _core.KvCache.create(
            requester.core, slab_pages, slabs, blocks_per_slab, reserved_blocks
        )
        self._shape = Shape(page_bytes, tuple(slab_pages), blocks_per_slab, slabs)
        self._offers: Offers | None = None  # set by the first offer

    def __repr__(self) -> str:
        mapped = f"{self.mapped_bytes()} bytes mapped"
        return f"KVCache({self.num_blocks} blocks, {self.live_blocks()} live, {mapped})"

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the whole virtual space, including reserved ones."""
        return self._core.total_blocks

    def k_buffer(self, layer: int) -> _core.TensorView:
        """Returns K of a layer for from_dlpack: (num_tokens, num_kv_heads, head_dim)."""
        return self.buffer(layer, "k")

    def v_buffer(self, layer: int) -> _core.TensorView:
        """Returns V of a layer for from_dlpack: (num_tokens, num_kv_heads, v_head_dim)."""
        return self.buffer(layer, "v")

    def buffer(self, layer: int, part: str) -> _core.TensorView:
        """Returns a part of a layer ("k", "v", "latent") by tokens: (tokens, heads, dim).

        Strided if the layout interleaves tokens. Raises InvalidArgumentError if it interleaves
        blocks.
        """
        return self._view(self.layout.tokens_of(layer, part, self.num_tokens))

    def k_blocks(self, layer: int) -> _core.TensorView:
        """Returns K of a layer by blocks, any layout: (blocks, block_tokens, heads, head_dim)."""
        return self.blocks(layer, "k")

    def v_blocks(self, layer: int) -> _core.TensorView:
        """Returns V of a layer by blocks, any layout: (blocks, block_tokens, heads, v_head_dim)."""
        return self.blocks(layer, "v")

    def blocks(self, layer: int, part: str) -> _core.TensorView:
        """Returns a part of a layer by blocks: (num_blocks, block_tokens, heads, dim), maybe
        strided.
        """
        return self._view(self.layout.blocks_of(layer, part, self.num_blocks))

    def _view(self, place: TensorPlacement) -> _core.TensorView:
        return self._core.buffer_view(
            place.buffer,
            place.offset_bytes,
            list(place.shape),
            list(place.strides),
            self.layout.dtype,
        )

    def alloc_kv(self, num_blocks: int, *, wait_s: float = _AT_ONCE) -> NDArray[np.int64] | None:
        """Allocates blocks, mapping pages as needed. Returns their ids, or None without room now.

        All or nothing. The ids are an int64 array; the blocks' contents are undefined. With
        `wait_s` other clients are asked to shrink as the client's `shrink_policy` says, and the
        call blocks until room is available or `wait_s` expires. Memory that is freed meanwhile is
        kept for waiting clients in the order in which they began to wait.
        """
        if wait_s is not _AT_ONCE:
            duration("wait_s", wait_s)
        try:
            ids = self._core.alloc(num_blocks)
        except TypeError as error:
            raise InvalidArgumentError(
                f"num_blocks must be an integer below 2^63, not {shown(num_blocks)}"
            ) from error
        if ids is not None or wait_s == 0:
            return ids
        request = MemoryRequest(self._requester, lambda: self._missing_bytes(num_blocks))
        return wait_for(request, lambda: self._core.alloc(num_blocks), wait_s)

    def free_kv(self, ids: NDArray[np.int64]) -> None:
        """Frees blocks. Pages without a live block are returned, except those the watermarks keep.

        Raises DoubleFreeError or UnknownBlockError before anything changes. Blocks that are offered
        to another process (`offer_kv`) count as live until the offer ends.
        """
        try:
            if self._offers is not None and self._offers.active:
                ids = self._not_offered(self._offers, ids)
            self._core.free(ids)
        except TypeError as error:
            raise InvalidArgumentError(_WRONG_IDS) from error

    def _not_offered(self, offers: Offers, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the `ids` that no offer holds. The others are freed when their offers end."""
        self._core.check_free(ids)
        try:
            return offers.keep(ids)
        except KeyError as error:
            raise DoubleFreeError(f"block {error} was freed before") from error

    # --- handing blocks to another process ---------------------------------------------------

    @checked(deadline_s=duration)
    def offer_kv(self, ids: NDArray[np.int64], *, deadline_s: float = 10.0) -> Offer:
        """Offers live blocks to another process of this user on this machine.

        That process copies their contents into its own blocks (`fetch_kv`), from device to device
        and without a file. The offer ends when the blocks are fetched, it is withdrawn or
        `deadline_s` expires (one second later while they are being read). Until then the blocks
        keep their contents and stay charged to this client. They may be freed at once; they are
        released when the offer ends.

        Waits for the work on the client's streams (`Client.set_streams`). A thread, started by the
        first offer, serves offers. It frees blocks, so offer none while a graph is captured. If
        this process dies, its record in the ledger stays while another process reads its pages.
        Raises UnknownBlockError, DoubleFreeError, PagesInUseError, BackendUnavailableError where
        the driver cannot share memory, HandoverError where the process has no descriptor or thread
        left to serve offers.
        """
        self.check_free(ids)
        if len(ids) == 0:
            raise InvalidArgumentError("ids is empty; offer at least one block")
        return self._all_offers().add(ids, deadline_s)

    def _all_offers(self) -> Offers:
        # Imports sockets and threads, which most processes never need.
        try:
            from kvcached.handover.offers import Offers
        except OSError as error:
            raise HandoverError(f"blocks cannot be offered: {error}") from error

        if self._offers is None:
            self._offers = Offers(self._local_cache(), self._core.free)
        return self._offers

    @checked(device=text)
    def can_offer_to(self, device: str) -> bool:
        """Returns whether a client on `device` ("host:1", "cuda:0") could fetch this cache's
        blocks.

        True if both are on the host, or both on GPUs that read each other's memory.
        """
        _core.check_device_name(device)
        kind, _, ordinal = device.partition(":")
        return _core.can_share_with(self._requester.core, kind == "cuda", int(ordinal))

    def open_offers(self) -> int:
        """Returns the number of offers that have not ended. Offers end without further calls."""
        return 0 if self._offers is None else len(self._offers)

    @checked(address=text, skip=not_negative, timeout_s=duration)
    def fetch_kv(
        self, address: str, ids: NDArray[np.int64], *, skip: int = 0, timeout_s: float = 5.0
    ) -> None:
        """Fills live blocks with the blocks offered at `Offer.address`, in the order of both.

        The first `skip` offered blocks are left out. The other process's pages are mapped here,
        read-only, some at a time, copied page to page, and unmapped; then the offer ends. The
        layouts must be equal; devices, cache sizes and ids may differ. Raises HandoverError on
        failure, within `timeout_s`; the blocks' contents are undefined then. Raises
        UnknownBlockError, DoubleFreeError.
        """
        try:
            from kvcached.handover.fetch import fetch
        except OSError as error:
            raise HandoverError(f"blocks cannot be fetched: {error}") from error

        self.check_free(ids)
        fetch(self._local_cache(), address, ids, skip, timeout_s)

    def _local_cache(self) -> LocalCache:
        return LocalCache(self._requester.core, self._core, self.layout, self._shape)

    def missing_pages(self, num_blocks: int) -> int | None:
        """Returns the pages that alloc_kv would take from the ledger, after mapped and spare pages.

        Returns None if the virtual space does not have that many free blocks.
        """
        return self._core.missing_pages(not_negative("num_blocks", num_blocks))

    def find_room(self, num_pages: int) -> bool:
        """Returns whether the ledger would grant that many pages now. None of them is reserved.

        Spare pages of this client's other caches are given back if that is needed for them.
        """
        return self._core.find_room(not_negative("num_pages", num_pages))

    def check_free(self, ids: NDArray[np.int64]) -> None:
        """Raises the errors that free_kv would raise, and changes nothing."""
        try:
            self._core.check_free(ids)
        except TypeError as error:
            raise InvalidArgumentError(_WRONG_IDS) from error

    def can_alloc(self, num_blocks: int) -> bool:
        """Returns whether alloc_kv would succeed now. Other clients may change that at any time."""
        return self._core.can_alloc(not_negative("num_blocks", num_blocks))

    def available_blocks(self) -> int:
        """Returns the number of blocks that alloc_kv would grant now.

        Counts free blocks on mapped pages, on pages that the ledger would grant this client (within
        its limit and the others' minimums), and on spare pages of the client's other caches. While
        the client's thread moves pages the number may be off by one batch.
        """
        return self._core.available_blocks()

    def free_mapped_blocks(self) -> int:
        """Returns the number of free blocks on mapped pages, which need no mapping."""
        return self._core.free_mapped_blocks

    def live_blocks(self) -> int:
        """Returns the number of allocated blocks, without reserved ones."""
        return self._core.live_blocks

    def mapped_bytes(self) -> int:
        """Returns the bytes of mapped pages."""
        return self._core.mapped_bytes

    def quarantined_bytes(self) -> int:
        """Returns the mapped bytes without a live block that wait for the streams (`set_streams`).

        They are still charged. alloc_kv takes such blocks again without a call to the driver.
        """
        return self._core.quarantined_bytes

    def settle(self) -> None:
        """Unmaps pages that the streams no longer use, or lets the client's thread do it.

        For idle moments; never waits for a stream.
        """
        self._core.settle()

    def floor_bytes(self) -> int:
        """Returns the bytes mapped without live blocks: the slabs of the reserved blocks."""
        return self._core.floor_bytes

    def fragmentation(self) -> Fragmentation:
        """Returns the mapped bytes and the fewest slabs that could hold the live blocks."""
        return Fragmentation(self._core.mapped_bytes, self._core.needed_bytes)

    @checked(low=not_negative, high=not_negative)
    def set_premapped_pages(self, low: int, high: int) -> None:
        """Keeps pages mapped ahead of need, in whole slabs, so that alloc_kv needs no driver call.

        When a free leaves more than `high` pages without a live block, all but `low` are unmapped.
        Below `low` pages are mapped again. A thread of the client does both. With
        `background=False` `free_kv` unmaps, and `refill` maps. The thread takes pages only while a
        sixteenth of the device stays free, apart from its own minimum. Below a thirty-second, or
        while a client waits for memory, it returns all spare pages. While a stream captures a
        graph, pages stay.

        The pages count as reserved. They are returned at once by `trim`, when the client's limit
        falls below what it holds (within 0.1 s if another process lowers it), and when another
        cache, tensor or static lease of this client needs the room. Default: 0, 0 on a host device
        and without a thread. Default on a GPU: two slabs or 128 MiB, whichever is more, to twice as
        much, with the lower mark at most a 32nd of the device.
        """
        self._core.set_mapped_spares(low, high)

    def refill(self) -> int:
        """Maps pages ahead of need up to the low watermark, as far as there is room.

        For idle moments of an engine without kvcached's thread. Takes no spare pages of other
        caches. Returns the number of pages that were mapped.
        """
        return self._core.refill()

    @checked(low=not_negative, high=not_negative)
    def set_spare_pages(self, low: int, high: int) -> None:
        """Keeps up to `high` unmapped pages for reuse. Above that, all but `low` are returned.

        Below `low` the client's thread creates pages, as in `set_premapped_pages`. Spare pages
        count as reserved and are not available to other clients. They are returned like premapped
        pages when this client needs the room elsewhere. Default: 0, 0.
        """
        self._core.set_spare_pages(low, high)

    def trim(self) -> int:
        """Returns every page without a live block to the device. Returns the number of pages.

        Waits for the streams up to their max_wait_s. Pages still in use then are returned later.
        """
        return self._core.trim()

    @checked(size_bytes=not_negative)
    def choose_evictions(
        self, ids: NDArray[np.int64], last_used: NDArray[np.int64], size_bytes: int
    ) -> tuple[NDArray[np.int64], int]:
        """Chooses blocks whose eviction frees pages of `size_bytes`.

        Returns their ids, and the bytes that become free: fewer if there are not enough. `ids` are
        live blocks that no request uses, `last_used` their times of last use on any clock: int64
        arrays of equal length. Slabs are chosen whole: those with the fewest live tokens first,
        since each frees the same memory, then the least recently used. A slab with a block outside
        of `ids` is never chosen. Changes nothing. Raises UnknownBlockError, DoubleFreeError,
        InvalidArgumentError.
        """
        try:
            return self._core.choose_evictions(ids, last_used, size_bytes)
        except TypeError as error:
            raise InvalidArgumentError(f"{_WRONG_IDS}, and last_used too") from error

    @checked(cache=has("evictable", "evict"))
    def evictable_bytes(self, cache: PrefixCache) -> int:
        """Returns the bytes of pages that hold only evictable blocks of the prefix cache."""
        return self.choose_evictions(*cache.evictable(), _EVERYTHING)[1]

    @checked(size_bytes=not_negative, cache=has("evictable", "evict"))
    def shrink(self, size_bytes: int | None = None, cache: PrefixCache | None = None) -> Shrunk:
        """Returns pages without a live block to the device, then pages of the prefix cache.

        Stops after `size_bytes` (None: all it can). The cache's blocks are chosen by page
        (`choose_evictions`) and freed by the cache itself. A cache that evicts other blocks instead
        is asked again until enough memory is free or it has nothing left.
        """
        wanted_bytes = _EVERYTHING if size_bytes is None else size_bytes
        held_bytes = self._committed_bytes()
        spare_bytes = returned_bytes = max(0, held_bytes - self._trimmed_bytes())
        evicted_tokens = 0
        while cache is not None and returned_bytes < wanted_bytes:
            ids, _ = self.choose_evictions(*cache.evictable(), wanted_bytes - returned_bytes)
            if len(ids) == 0:
                break
            tokens = cache.evict(ids)
            if tokens == 0:
                break
            evicted_tokens += tokens
            returned_bytes = max(0, held_bytes - self._trimmed_bytes())
        return Shrunk(returned_bytes, evicted_tokens, max(0, returned_bytes - spare_bytes))

    def _committed_bytes(self) -> int:
        return self._requester.core.record().committed_bytes

    def _trimmed_bytes(self) -> int:
        self.trim()
        return self._committed_bytes()

    def _missing_bytes(self, num_blocks: int) -> int | None:
        pages = self.missing_pages(num_blocks)
        return None if pages is None else pages * self._page_bytes

    def check_integrity(self) -> None:
        """Recounts the books. Raises InternalError if they do not add up."""
        self._core.check()

    def counters(self) -> KVCounters:
        """Returns the mapping calls and pages since the cache was made."""
        return KVCounters(*self._core.counters())

    def _free(self) -> None:
        if self._offers is not None:
            self._offers.close()
        self._core.close()
