"""The KV cache of one model: blocks of tokens on pages that come and go (Prism §5.2, Table 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached import _core
from kvcached.asking import Asker, Want, wait_for
from kvcached.balloon import PrefixCache, Shrunk
from kvcached.checks import not_negative, patience, positive
from kvcached.errors import DoubleFreeError, InvalidArgumentError
from kvcached.handover.plan import Shape
from kvcached.usage import Fragmentation, KVCounters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcached.handover.offer import Offer
    from kvcached.handover.offers import Offers
    from kvcached.layouts import KVLayout, Placement

_WRONG_IDS = "ids must be a 1-D int64 array on the CPU"

_EVERYTHING = 2**63 - 1


class KVCache:
    """Made by `Client.alloc_kvcache`; used from one thread. Spare pages may be kept by another.

    Block b holds the tokens from b * block_tokens on, in every buffer. Blocks below
    `reserved_blocks` are never handed out and always mapped: padding may be written there.
    """

    def __init__(
        self,
        asker: Asker,
        page_bytes: int,
        layout: KVLayout,
        num_tokens: int,
        reserved_blocks: int,
    ) -> None:
        positive("num_tokens", num_tokens)
        not_negative("reserved_blocks", reserved_blocks)
        slab_tokens = layout.slab_tokens(page_bytes)
        slabs = -(-num_tokens // slab_tokens)
        slab_pages = layout.slab_pages(page_bytes)
        blocks_per_slab = slab_tokens // layout.block_tokens
        size_bytes = slabs * sum(slab_pages) * page_bytes
        if max(slabs, blocks_per_slab) >= 2**32 or size_bytes >= 2**63:
            raise InvalidArgumentError(f"num_tokens {num_tokens} is too large; ask for less")
        self.layout = layout
        self.num_tokens = slabs * slab_tokens
        self._asker = asker
        self._page_bytes = page_bytes
        self._core = _core.KvCache.create(
            asker.core,
            slab_pages,
            slabs,
            blocks_per_slab,
            reserved_blocks,
        )
        self._shape = Shape(page_bytes, tuple(slab_pages), blocks_per_slab, slabs)
        self._offers: Offers | None = None  # from the first one on

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole virtual space, reserved ones included."""
        return self._core.total_blocks

    def k_buffer(self, layer: int) -> _core.TensorView:
        """K of a layer for from_dlpack: (num_tokens, num_kv_heads, head_dim)."""
        return self.buffer(layer, "k")

    def v_buffer(self, layer: int) -> _core.TensorView:
        """V of a layer for from_dlpack: (num_tokens, num_kv_heads, v_head_dim)."""
        return self.buffer(layer, "v")

    def buffer(self, layer: int, part: str) -> _core.TensorView:
        """A part of a layer ("k", "v", "latent") for from_dlpack, by tokens: (tokens, heads, dim).

        Strided if the layout interleaves tokens; InvalidArgumentError if it interleaves blocks.
        """
        return self._view(self.layout.tokens_of(layer, part, self.num_tokens))

    def k_blocks(self, layer: int) -> _core.TensorView:
        """K of a layer by blocks, on every layout: (blocks, block_tokens, heads, head_dim)."""
        return self.blocks(layer, "k")

    def v_blocks(self, layer: int) -> _core.TensorView:
        """V of a layer by blocks, on every layout: (blocks, block_tokens, heads, v_head_dim)."""
        return self.blocks(layer, "v")

    def blocks(self, layer: int, part: str) -> _core.TensorView:
        """A part of a layer by blocks: (num_blocks, block_tokens, heads, dim), maybe strided."""
        return self._view(self.layout.blocks_of(layer, part, self.num_blocks))

    def _view(self, place: Placement) -> _core.TensorView:
        return self._core.buffer_view(
            place.buffer,
            place.offset_bytes,
            list(place.shape),
            list(place.strides),
            self.layout.dtype,
        )

    def alloc_kv(self, num_blocks: int, *, wait_s: float = 0.0) -> NDArray[np.int64] | None:
        """Ids of blocks that are mapped and yours, or None if there is no room now.

        All or nothing. Maps pages as needed; what they contain is undefined. With `wait_s` others
        are asked to shrink as the client's `shrink_policy` says, and this waits until there is
        room, whoever made it, or the time is over. What comes free meanwhile is kept for those who
        wait, in the order in which they came. An int64 array.
        """
        try:
            ids = self._core.alloc(num_blocks)
        except TypeError as error:
            raise InvalidArgumentError(
                f"num_blocks must be an integer below 2^63, not {num_blocks!r}"
            ) from error
        if ids is not None or patience("wait_s", wait_s) == 0:
            return ids
        want = Want(self._asker, lambda: self._missing_bytes(num_blocks))
        return wait_for(want, lambda: self._core.alloc(num_blocks), wait_s)

    def free_kv(self, ids: NDArray[np.int64]) -> None:
        """Frees blocks; pages without a live block go back, but for what the watermarks keep.

        Raises DoubleFreeError or UnknownBlockError before anything changes. Blocks that are offered
        to another process (`offer_kv`) count as live until that is over.
        """
        try:
            if self._offers is not None and self._offers.standing:
                ids = self._not_offered(self._offers, ids)
            self._core.free(ids)
        except TypeError as error:
            raise InvalidArgumentError(_WRONG_IDS) from error

    def _not_offered(self, offers: Offers, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of `ids` that nobody waits for: the others go later."""
        self._core.check_free(ids)
        try:
            return offers.keep(ids)
        except KeyError as error:
            raise DoubleFreeError(f"block {error} was freed before") from error

    # --- blocks of one process in another's --------------------------------------------------

    def offer_kv(self, ids: NDArray[np.int64], *, deadline_s: float = 10.0) -> Offer:
        """Offers live blocks to another process of this user on the machine, which copies their
        contents into blocks of its own (`fetch_kv`): from device to device, over no file.

        The blocks stay as they are, and charged to this client, until they are fetched, withdrawn,
        or `deadline_s` is over (a second later if somebody is reading them then), also if they are
        freed in the meantime: free them at once, and they go when nobody waits for them any more.
        Work on them that the streams were given is waited for (`Client.set_streams`). A thread
        serves offers, the first of which starts it, and frees what its owner has freed when an
        offer is over: not during the capture of a graph. Should this process die, its record in the
        ledger stays until nobody reads its pages. Raises UnknownBlockError, DoubleFreeError,
        PagesInUseError, BackendUnavailableError where the driver shares no memory, HandoverError
        where the process has no descriptor or thread left to serve them.
        """
        self.check_free(ids)
        if len(ids) == 0:
            raise InvalidArgumentError("ids is empty; offer one block at least")
        return self._all_offers().add(ids, patience("deadline_s", deadline_s))

    def _all_offers(self) -> Offers:
        # With sockets and threads, which most who import kvcached never need.
        from kvcached.handover.offers import Offers, Source

        if self._offers is None:
            source = Source(self._asker.core, self._core, self.layout, self._shape)
            self._offers = Offers(source, self._core.free)
        return self._offers

    def can_offer_to(self, device: str) -> bool:
        """Whether a client on `device` ("host:1", "cuda:0") could fetch blocks from this one: both
        on the host, or both on GPUs that read each other's memory."""
        _core.check_device_name(device)
        kind, _, ordinal = device.partition(":")
        return _core.can_share_with(self._asker.core, kind == "cuda", int(ordinal))

    def open_offers(self) -> int:
        """Offers that are not over. They end by themselves."""
        return 0 if self._offers is None else len(self._offers)

    def fetch_kv(
        self, address: str, ids: NDArray[np.int64], *, skip: int = 0, timeout_s: float = 5.0
    ) -> None:
        """Fills live blocks with those that `Offer.address` names, in the order of both, from the
        one after the first `skip` on.

        The other process's pages are mapped here, read-only, a part of them at a time, copied page
        to page, and unmapped; the offer is over then. The layouts must be equal; the devices, the
        sizes of the caches and the ids need not be. Raises HandoverError when that cannot be, in
        `timeout_s` at the latest; the blocks hold anything then. Raises UnknownBlockError,
        DoubleFreeError.
        """
        from kvcached.handover.fetch import Target, fetch

        self.check_free(ids)
        target = Target(self._asker.core, self._core, self.layout, self._shape)
        fetch(target, address, ids, not_negative("skip", skip), patience("timeout_s", timeout_s))

    def missing_pages(self, num_blocks: int) -> int | None:
        """Pages that alloc_kv would take from the ledger: 0 if what is mapped or spare will do.

        None if the virtual space has not as many blocks left.
        """
        return self._core.missing_pages(not_negative("num_blocks", num_blocks))

    def find_room(self, num_pages: int) -> bool:
        """Whether the ledger would grant so many pages at this moment; none is kept.

        What could be given back for them is: the spare pages of this client's other caches.
        """
        return self._core.find_room(not_negative("num_pages", num_pages))

    def check_free(self, ids: NDArray[np.int64]) -> None:
        """Raises what free_kv would raise; changes nothing."""
        try:
            self._core.check_free(ids)
        except TypeError as error:
            raise InvalidArgumentError(_WRONG_IDS) from error

    def can_alloc(self, num_blocks: int) -> bool:
        """Whether alloc_kv would succeed now; other clients may change that at any time."""
        not_negative("num_blocks", num_blocks)
        free = self._core.free_mapped_blocks
        return num_blocks <= free or num_blocks <= self._core.available_blocks()

    def available_blocks(self) -> int:
        """Blocks that alloc_kv would grant now.

        Free blocks on mapped pages, those on pages that the ledger would grant this client (its
        limit and the others' minimums counted), and those on spare pages that the client's other
        caches would give back. While the client's thread moves pages it may be off by one batch.
        """
        return self._core.available_blocks()

    def free_mapped_blocks(self) -> int:
        """Free blocks on mapped pages: these cost no mapping."""
        return self._core.free_mapped_blocks

    def live_blocks(self) -> int:
        """Blocks that are allocated, reserved ones not counted."""
        return self._core.live_blocks

    def mapped_bytes(self) -> int:
        """Bytes of mapped pages."""
        return self._core.mapped_bytes

    def quarantined_bytes(self) -> int:
        """Of mapped_bytes, what has no live block and waits for the streams (Client.set_streams).

        Still charged. alloc_kv takes such blocks again without a call to the driver.
        """
        return self._core.quarantined_bytes

    def settle(self) -> None:
        """Unmaps what the streams are done with; for idle moments. Never waits for a stream."""
        self._core.settle()

    def floor_bytes(self) -> int:
        """Bytes that stay mapped when no block is live: the slabs of the reserved blocks."""
        return self._core.floor_bytes

    def fragmentation(self) -> Fragmentation:
        """Mapped bytes against the fewest slabs that could hold what is live."""
        return Fragmentation(self._core.mapped_bytes, self._core.needed_bytes)

    def set_premapped_pages(self, low: int, high: int) -> None:
        """Keeps pages mapped ahead of need, in whole slabs; alloc_kv takes them without the driver.

        When a free leaves more than `high` without a live block, all but `low` are unmapped; below
        `low` pages are mapped again. A thread of the client does both, unless it was opened with
        `background=False`: then `free_kv` unmaps, and `refill` maps. It starts with the first `low`
        above 0, never calls Python, and takes pages only while a sixteenth of the device stays free
        (its own minimum aside); below a thirty-second, or when anybody waits for memory, it gives
        all spare pages back. With streams (`Client.set_streams`), whose fences are the engine's to
        make, it leaves mapped ones alone: they go when the engine frees, trims or answers, or when
        an offer ends whose blocks it has freed (`offer_kv`), which another thread may do.

        They count as reserved, like spare pages, and go back at once in `trim`, when the client's
        limit falls below what it holds (within 0.1 s if another process lowers it, by the thread),
        and when another cache, tensor or static lease of this client would not find room; after
        that the thread maps none for a while. Default: 0, 0.
        """
        self._core.set_mapped_spares(not_negative("low", low), not_negative("high", high))

    def refill(self) -> int:
        """Maps pages ahead of need up to the low watermark, as far as there is room.

        For the idle moments of an engine without a thread of kvcached's. Asks no other cache for
        its spare pages. Returns the pages that were mapped.
        """
        return self._core.refill()

    def set_spare_pages(self, low: int, high: int) -> None:
        """Keeps unmapped pages for reuse: up to `high`; above that all but `low` are given back.

        Below `low` the client's thread creates them, as in `set_premapped_pages`.
        Spare pages count as reserved and are not available to other clients; when this client needs
        room elsewhere they go back as premapped ones do. Default: 0, 0.
        """
        self._core.set_spare_pages(not_negative("low", low), not_negative("high", high))

    def trim(self) -> int:
        """Gives every page without a live block back now. Returns how many pages went.

        Waits for the streams up to their max_wait_s; what they still use follows later.
        """
        return self._core.trim()

    def choose_evictions(
        self, ids: NDArray[np.int64], last_used: NDArray[np.int64], size_bytes: int
    ) -> tuple[NDArray[np.int64], int]:
        """Which of these blocks to evict so that pages of `size_bytes` come free, and the bytes
        that will: fewer where no more can.

        `ids` are live blocks that no request uses, `last_used` says when each was last used, on any
        clock: int64 arrays of one length. Slabs go whole: those with the fewest live tokens first
        (each gives the same memory back), then those not used for the longest time; one that holds
        a block outside of `ids` never. Changes nothing. Raises UnknownBlockError, DoubleFreeError,
        InvalidArgumentError.
        """
        not_negative("size_bytes", size_bytes)
        try:
            return self._core.choose_evictions(ids, last_used, size_bytes)
        except TypeError as error:
            raise InvalidArgumentError(f"{_WRONG_IDS}, and last_used too") from error

    def evictable_bytes(self, cache: PrefixCache) -> int:
        """Bytes of pages that hold nothing but evictable blocks of the prefix cache."""
        return self.choose_evictions(*cache.evictable(), _EVERYTHING)[1]

    def shrink(self, size_bytes: int | None = None, cache: PrefixCache | None = None) -> Shrunk:
        """Gives memory back: every page without a live block, then pages of the prefix cache until
        `size_bytes` have gone (None: all that can).

        The cache's blocks are chosen by page (`choose_evictions`) and freed by the cache itself;
        one that lets others go instead is asked again until there is room or it has no more.
        """
        wanted_bytes = _EVERYTHING if size_bytes is None else not_negative("size_bytes", size_bytes)
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
        return self._asker.core.record().committed_bytes

    def _trimmed_bytes(self) -> int:
        self.trim()
        return self._committed_bytes()

    def _missing_bytes(self, num_blocks: int) -> int | None:
        pages = self.missing_pages(num_blocks)
        return None if pages is None else pages * self._page_bytes

    def check_integrity(self) -> None:
        """Recounts the books; raises InternalError if they do not add up."""
        self._core.check()

    def counters(self) -> KVCounters:
        """Mapping calls and pages since the cache was made."""
        return KVCounters(*self._core.counters())

    def _free(self) -> None:
        if self._offers is not None:
            self._offers.close()
        self._core.close()
