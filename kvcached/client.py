"""Clients: processes registered in a device's ledger, and the memory charged to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import kvcached._core as _core
from kvcached.balloon import ShrinkPolicy, ShrinkRequest, Shrunk, spares_then_idle_caches
from kvcached.checks import (
    MAX_BYTES,
    checked,
    duration,
    each,
    function,
    instance_of,
    not_negative,
    optional,
    positive,
    text,
)
from kvcached.errors import InvalidArgumentError, NoRoomError
from kvcached.group import KVCacheGroup
from kvcached.kvcache import KVCache
from kvcached.layouts import HybridLayout, KVLayout
from kvcached.memory_requests import NO_LIMIT, MemoryRequest, Requester, wait_for
from kvcached.tensor import VirtualTensor
from kvcached.usage import ClientUsage
from kvcached.weights.arena import AddressUsage, WeightArena
from kvcached.weights.links import STAGING_BYTES, WeightLinks
from kvcached.weights.spec import WeightLayout


class StaticLease:
    """Memory that is charged until released: weights, activations, contexts."""

    def __init__(self, client: _core.Client, size_bytes: int, what: str) -> None:
        client.reserve_static(size_bytes)
        self.size_bytes = size_bytes
        self.what = what
        self._client: _core.Client | None = client

    def release(self) -> None:
        """Returns the lease to the device. A second call does nothing."""
        if self._client is not None:
            self._client.release_static(self.size_bytes)
            self._client = None

    def __repr__(self) -> str:
        state = "" if self._client else ", released"
        return f"StaticLease({self.what!r}, {self.size_bytes} bytes{state})"


class Client:
    """One record in a device's ledger, and the memory charged to it.

    Made by `Device.client`. Closing it, or the death of its process, returns everything it holds. A
    forked child cannot use its parent's client (ForkedClientError) and opens its own. Used from one
    thread; a process may have several clients.
    """

    def __init__(
        self,
        core: _core.Client,
        name: str,
        page_bytes: int,
        shrink_policy: ShrinkPolicy = spares_then_idle_caches,
    ) -> None:
        self._core = core
        self.name = name
        self.page_bytes = page_bytes
        self._requester = Requester(core, shrink_policy)

    def __repr__(self) -> str:
        return f"Client({self.name!r})"

    def usage(self) -> ClientUsage:
        """Returns this client's record."""
        return ClientUsage.of(self._core.record())

    @checked(limit_bytes=optional(not_negative))
    def set_limit(self, limit_bytes: int | None) -> None:
        """Limits the client's pages (None: only the device limits them). Takes effect at once.

        A limit below what is held stops growth, returns spare pages at once, and requests the rest:
        see `shrink_request`.
        """
        self._core.set_limit(limit_bytes)

    @checked(min_bytes=not_negative)
    def set_min(self, min_bytes: int) -> None:
        """Guarantees pages that no other client can take.

        Raises NoRoomError if they are not free.
        """
        self._core.set_min(min_bytes)

    @checked(max_wait_s=duration)
    def set_create_wait(self, max_wait_s: float) -> None:
        """Sets how long the creation of a granted page may take. Default: 10 s on a GPU, 0.5 s on a
        host device.

        A GPU can be full although the ledger grants a page: the driver takes seconds to free a dead
        process's memory, and processes outside of kvcached use the GPU. After `max_wait_s` there is
        no room: None, or NoRoomError with the driver's error. From then on each create is tried
        once, until no create was refused for eight times `max_wait_s`.
        """
        self._core.set_create_wait(max_wait_s)

    def guard_holes(self) -> None:
        """Makes addresses of a KV cache without a page read as zeros instead of faulting.

        For engines under MPS, where an illegal access by one client ends all clients of the GPU.
        Such engines pass `guard_holes=True` to `Device.client`, so that it precedes every KV cache.
        Unmapped addresses show one read-only page of zeros, leased as static memory (NoRoomError).
        On a driver without read-only mappings engines must not write there. KV caches that exist
        already, and other tensors, are covered only where pages are unmapped later. On a GPU this
        costs one map for each page of a new KV cache's addresses, and one more call for each page
        that is mapped or unmapped.
        """
        self._core.guard_holes()

    def scrub_pages(self) -> None:
        """Zeroes pages when they are unmapped from now on, before any reuse.

        Without it a page shows what this client last wrote there, in any of its tensors. Another
        client never sees that content on a host device. On a GPU that depends on the driver
        clearing memory, which CUDA does not promise. A process that is killed zeroes nothing.
        """
        self._core.scrub_pages()

    @checked(handles=each(not_negative), max_wait_s=duration)
    def set_streams(self, handles: Sequence[int], max_wait_s: float = 1.0) -> None:
        """Sets the streams of the engine's work; pages stay mapped until that work is done.

        `handles` are CUstreams on a GPU (`torch.cuda.Stream.cuda_stream`; 0 is the default stream),
        and handles of `kvcached.testing.HostStream` on a host device. Call `free_kv` after
        submitting the last work on its blocks. The pages stay mapped and charged until all work
        submitted before is done, but the blocks may be allocated again at once. With several
        streams the engine orders work on one block.

        `trim`, unmapping and closing wait for the streams, at most `max_wait_s` each.
        PagesInUseError is raised instead of waiting for a stream that captures a graph. The streams
        must outlive the client or the call `set_streams([])`. Without streams, the default, pages
        are unmapped at once, so an engine on a GPU must synchronise before it frees.
        """
        self._core.set_streams(list(handles), max_wait_s)

    @checked(size_bytes=positive, what=text, wait_s=duration)
    def reserve_static(self, size_bytes: int, what: str, *, wait_s: float = 0.0) -> StaticLease:
        """Leases memory outside of kvcached (torch's, for example) before it is allocated.

        `what` is a label for people. Limit and minimum do not apply. Raises NoRoomError, after
        asking others to shrink and waiting for up to `wait_s` as `KVCache.alloc_kv` does.
        """
        if wait_s == 0:
            return StaticLease(self._core, size_bytes, what)

        def take() -> StaticLease | None:
            try:
                return StaticLease(self._core, size_bytes, what)
            except NoRoomError:
                return None

        request = MemoryRequest(self._requester, lambda: size_bytes, is_static=True)
        return wait_for(request, take, wait_s) or StaticLease(self._core, size_bytes, what)

    # --- shrink requests ---------------------------------------------------------------------

    def fileno(self) -> int:
        """Returns a descriptor that is readable while a shrink request may be pending.

        An idle engine adds it to its poll, select or epoll to wake up and answer. Use it for
        polling alone; the client owns it and closes it with itself. The first call starts a thread
        that waits for requests.
        """
        return _core.fileno(self._core)

    def shrink_request(self) -> ShrinkRequest | None:
        """Returns what this client is asked to give back, or None if nothing.

        Called on every step of an engine, and when `fileno` is readable; the None case costs one
        read of shared memory. A request stays until it is answered, its deadline has passed, or
        enough memory was returned.
        """
        found = _core.shrink_request(self._core)
        if found is None:
            return None
        number, size_bytes = found
        if size_bytes == NO_LIMIT:
            return ShrinkRequest(number, None)
        return ShrinkRequest(number, min(size_bytes, MAX_BYTES))  # sums of requests can exceed it

    @checked(request=instance_of(ShrinkRequest), shrunk=instance_of(Shrunk))
    def answer(self, request: ShrinkRequest, shrunk: Shrunk) -> None:
        """Reports that this client gave all it could. Waiting clients resume or ask another one."""
        size_bytes = NO_LIMIT if request.size_bytes is None else request.size_bytes
        _core.answer(
            self._core,
            request.number,
            size_bytes,
            shrunk.returned_bytes,
            shrunk.evicted_tokens,
            shrunk.evicted_bytes,
        )

    def answer_requests(
        self, shrink: Callable[[int | None], Shrunk] | None = None
    ) -> Shrunk | None:
        """Serves a pending request with `shrink`, answers it, and returns what was given back.

        `shrink` gets the requested bytes (None: all it can give): `KVCache.shrink`, or `lambda
        size: kv.shrink(size, cache)`. Without `shrink` the answer is that nothing can be given.
        Returns None if no request is pending, at almost no cost: call it on every step, on the
        thread that steps, and when `fileno` is readable.
        """
        if shrink is not None:
            function("shrink", shrink)
        request = self.shrink_request()
        if request is None:
            return None
        shrunk = shrink(request.size_bytes) if shrink else Shrunk()
        self.answer(request, shrunk)
        return shrunk

    @checked(size_bytes=not_negative)
    def publish_evictable(self, size_bytes: int) -> None:
        """Publishes how many bytes of prefix cache this client could give up.

        Other clients request no more than that. `KVCache.evictable_bytes` computes it by page.
        """
        _core.publish_evictable(self._core, size_bytes)

    @checked(size_bytes=positive)
    def reserve_addresses(self, size_bytes: int) -> None:
        """Reserves, once, the address space for all later KV caches, weights and tensors (Prism
        §5.2).

        `size_bytes` is a multiple of the page size. A range is free again when its last view is
        gone. An object for which no range is free gets its own reservation, as every object does
        without this call. Raises InvalidArgumentError, AlignmentError.
        """
        self._core.reserve_addresses(size_bytes)

    def addresses(self) -> AddressUsage | None:
        """Returns the usage of the space made by `reserve_addresses`, None before that call."""
        sizes = self._core.addresses()
        return None if sizes is None else AddressUsage(*sizes)

    @checked(layout=instance_of(WeightLayout), what=text)
    def alloc_weights(self, layout: WeightLayout, what: str) -> WeightArena:
        """Leases memory for a model's tensors, as `reserve_static` does, and reserves addresses.

        No page exists until it is loaded. `what` is a label for people. Raises NoRoomError.
        """
        return WeightArena(self._core, layout, what)

    @checked(others=each(instance_of(object)))
    def open_weight_links(
        self, others: Sequence[Client] = (), *, threads: int = 4, staging_bytes: int = STAGING_BYTES
    ) -> WeightLinks:
        """Opens the links over which `WeightArena.load` fills this client's arenas.

        On a GPU each link's `threads` fill buffers of pinned memory, `staging_bytes` in all, while
        the GPU fetches the filled ones. `others` are clients on other GPUs whose links to the host
        help from the start (`WeightLinks.add`); either all of them are added or none. Raises as
        `add` does.
        """
        links = WeightLinks(self._core, threads=threads, staging_bytes=staging_bytes)
        try:
            for other in others:
                links.add(other)
        except BaseException:
            links.close()
            raise
        return links

    @checked(arena=instance_of(WeightArena))
    def free_weights(self, arena: WeightArena) -> None:
        """Returns the arena's pages and its lease; its address range is free with its last view."""
        self._check_owner(arena._client, "arena")
        arena.free()

    def _check_owner(self, owner: _core.Client, what: str) -> None:
        if owner is not self._core:
            raise InvalidArgumentError(f"the {what} belongs to another client; free it there")

    @checked(size_bytes=positive)
    def alloc_virtual_tensor(self, size_bytes: int) -> VirtualTensor:
        """Reserves address space, a multiple of the page size. No page is mapped yet."""
        return VirtualTensor(self._core, size_bytes)

    @checked(tensor=instance_of(VirtualTensor))
    def free_virtual_tensor(self, tensor: VirtualTensor) -> None:
        """Returns the tensor's pages; its address range is free once the last view is gone."""
        self._check_owner(tensor._client, "tensor")
        tensor._free()

    @overload
    def alloc_kvcache(
        self, layout: KVLayout, num_tokens: int, *, reserved_blocks: int = 1
    ) -> KVCache: ...

    @overload
    def alloc_kvcache(
        self, layout: HybridLayout, num_tokens: int, *, reserved_blocks: int = 1
    ) -> KVCacheGroup: ...

    @checked(
        layout=instance_of(KVLayout, HybridLayout),
        num_tokens=positive,
        reserved_blocks=not_negative,
    )
    def alloc_kvcache(
        self, layout: KVLayout | HybridLayout, num_tokens: int, *, reserved_blocks: int = 1
    ) -> KVCache | KVCacheGroup:
        """Reserves virtual space for at least `num_tokens`, rounded up to whole slabs.

        Only the slabs of the first `reserved_blocks` are resident. Raises NoRoomError if these do
        not fit. With a HybridLayout each group gets its own space of this size.
        """
        if isinstance(layout, HybridLayout):
            return KVCacheGroup(
                self._requester, self.page_bytes, layout, num_tokens, reserved_blocks
            )
        return KVCache(self._requester, self.page_bytes, layout, num_tokens, reserved_blocks)

    @checked(kvcache=instance_of(KVCache, KVCacheGroup))
    def free_kvcache(self, kvcache: KVCache | KVCacheGroup) -> None:
        """Returns the cache's pages; its address range is free once the last view is gone."""
        self._check_owner(kvcache._requester.core, "KV cache")
        kvcache._free()

    def close(self) -> None:
        """Returns everything to the device. A second call does nothing.

        Raises PagesInUseError, and changes nothing, if the streams do not end in time, weights are
        being loaded, or links to another GPU use this client's. Memory that is in use when the last
        reference goes stays until the process ends.
        """
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
