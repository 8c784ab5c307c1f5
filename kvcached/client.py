"""A process's stake in a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import kvcached._core as _core
from kvcached.asking import NO_LIMIT, MemoryRequest, Requester, wait_for
from kvcached.balloon import ShrinkPolicy, ShrinkRequest, Shrunk, spares_then_idle_caches
from kvcached.checks import (
    MAX_BYTES,
    checked,
    each,
    function,
    instance_of,
    not_negative,
    optional,
    patience,
    positive,
    text,
)
from kvcached.errors import InvalidArgumentError, NoRoomError
from kvcached.group import KVCacheGroup
from kvcached.kvcache import KVCache
from kvcached.layouts import HybridLayout, KVLayout
from kvcached.tensor import VirtualTensor
from kvcached.usage import ClientUsage
from kvcached.weights.arena import AddressUsage, WeightArena
from kvcached.weights.links import STAGING_BYTES, WeightLinks
from kvcached.weights.spec import WeightLayout


class StaticLease:
    """Memory that does not come and go: weights, activations, contexts. Charged until released."""

    def __init__(self, client: _core.Client, size_bytes: int, what: str) -> None:
        client.reserve_static(size_bytes)
        self.size_bytes = size_bytes
        self.what = what
        self._client: _core.Client | None = client

    def release(self) -> None:
        """Gives the lease back; a second call does nothing."""
        if self._client is not None:
            self._client.release_static(self.size_bytes)
            self._client = None

    def __repr__(self) -> str:
        state = "" if self._client else ", released"
        return f"StaticLease({self.what!r}, {self.size_bytes} bytes{state})"


class Client:
    """One record in a device's ledger, and the memory charged to it.

    Made by `Device.client`. Closing it, or the death of its process, returns everything it holds.
    A forked child cannot use its parent's client (ForkedClientError); it opens its own. Used from
    one thread; several clients may live in one process.
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
        """This client's record."""
        return ClientUsage.of(self._core.record())

    @checked(limit_bytes=optional(not_negative))
    def set_limit(self, limit_bytes: int | None) -> None:
        """Bounds the client's pages (None: by the device alone). Takes effect at once.

        Below what is held it stops growth, spare pages go at once, and the rest is asked for: see
        `shrink_request`.
        """
        self._core.set_limit(limit_bytes)

    @checked(min_bytes=not_negative)
    def set_min(self, min_bytes: int) -> None:
        """Guarantees pages: no other client can take them. NoRoomError if they are not free."""
        self._core.set_min(min_bytes)

    @checked(max_wait_s=patience)
    def set_create_wait(self, max_wait_s: float) -> None:
        """How long a page that the ledger granted may take to be had. Default: 10 s on a GPU, 0.5 s
        on a host device.

        A GPU can be full in spite of the ledger: the driver frees the memory of a process that died
        within seconds, and others use the GPU outside of kvcached. After `max_wait_s` there is no
        room: None, or NoRoomError with the driver's error. From then on each create is tried once,
        until none was refused for eight times `max_wait_s`.
        """
        self._core.set_create_wait(max_wait_s)

    def guard_holes(self) -> None:
        """From now on an address of a KV cache without a page reads as zeros instead of faulting.

        For engines under MPS, where the illegal access of one ends all that share the GPU; they
        pass `guard_holes=True` to `Device.client`, so that every KV cache comes after it. A hole
        shows one read-only page of zeros, leased as static memory (NoRoomError); on a driver
        without read-only mappings engines must not write there. KV caches that exist already, and
        other tensors, are covered only where pages are unmapped from now on. On a GPU this costs a
        map for each page of a new KV cache's addresses, and one more call for each page that comes
        or goes.
        """
        self._core.guard_holes()

    def scrub_pages(self) -> None:
        """From now on pages are zeroed as they are unmapped, before anything else can have them.

        Without it a page shows what this client wrote there last, in whatever tensor; another
        client never sees it on a host device, and on a GPU as far as the driver clears memory,
        which CUDA does not promise. A process that is killed zeroes nothing.
        """
        self._core.scrub_pages()

    @checked(handles=each(not_negative), max_wait_s=patience)
    def set_streams(self, handles: Sequence[int], max_wait_s: float = 1.0) -> None:
        """Names the streams that the engine's work runs on; nothing is unmapped under that work.

        `handles` are CUstreams on a GPU (`torch.cuda.Stream.cuda_stream`; 0 is the default stream)
        and those of `kvcached.testing.HostStream` on a host device. From then on `free_kv` is
        called after the last work on its blocks was submitted, and the pages stay mapped and
        charged until everything submitted before is done. The blocks may be handed out again at
        once; with several streams it is the engine that orders work on one block. `trim`, unmapping
        and closing wait for the streams, at most `max_wait_s` each; what would have to wait for one
        that captures a graph raises PagesInUseError. The streams outlive the client, or
        `set_streams([])` comes first. Without streams, the default, pages go at once: an engine on
        a GPU then synchronises before it frees.
        """
        self._core.set_streams(list(handles), max_wait_s)

    @checked(size_bytes=positive, what=text, wait_s=patience)
    def reserve_static(self, size_bytes: int, what: str, *, wait_s: float = 0.0) -> StaticLease:
        """Leases memory outside of kvcached (torch's, say) before it is allocated.

        `what` names it for people. Limit and minimum do not apply. Raises NoRoomError, after asking
        others to shrink and waiting for up to `wait_s` as `KVCache.alloc_kv` does.
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

    # --- the balloon -------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable while a request to shrink may wait: for the poll, select or
        epoll in which an idle engine sleeps, so that it wakes and answers.

        It is this client's, to be polled and nothing else, and is closed with it. Starts a thread
        that does nothing but wait for requests.
        """
        return _core.fileno(self._core)

    def shrink_request(self) -> ShrinkRequest | None:
        """What this client is asked to give back, None (after one look at shared memory) if
        nothing.

        For every step of an engine, and when `fileno` is readable. Stays until it is answered, its
        time is over, or it has come true.
        """
        found = _core.shrink_request(self._core)
        if found is None:
            return None
        number, size_bytes = found
        if size_bytes == NO_LIMIT:
            return ShrinkRequest(number, None)
        return ShrinkRequest(number, min(size_bytes, MAX_BYTES))  # several asks add up to more

    @checked(request=instance_of(ShrinkRequest), shrunk=instance_of(Shrunk))
    def answer(self, request: ShrinkRequest, shrunk: Shrunk) -> None:
        """Reports that this client gave all it could. Waiting clients go on, or ask another one."""
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
        """Does what this client is asked for with `shrink`, answers, and says what went.

        `shrink` gets the bytes that are wanted (None: all that can go): `KVCache.shrink`, or
        `lambda size: kv.shrink(size, cache)`. Without it the answer is that there is nothing to
        give. None if nothing is asked for, which costs next to nothing: call it on every step, on
        the thread that steps, and when `fileno` is readable.
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
        """Tells the others how many bytes of prefix cache this client could give up.

        They ask for no more than that. `KVCache.evictable_bytes` computes it to the page.
        """
        _core.publish_evictable(self._core, size_bytes)

    @checked(size_bytes=positive)
    def reserve_addresses(self, size_bytes: int) -> None:
        """Reserves, once, the addresses that KV caches, weights and tensors are laid out in from
        then on, model after model (Prism §5.2). A multiple of the page size.

        A range is free again when its last view is gone. What finds no range gets a reservation of
        its own, as everything does without this call. Raises InvalidArgumentError, AlignmentError.
        """
        self._core.reserve_addresses(size_bytes)

    def addresses(self) -> AddressUsage | None:
        """The space that `reserve_addresses` made; None before."""
        sizes = self._core.addresses()
        return None if sizes is None else AddressUsage(*sizes)

    @checked(layout=instance_of(WeightLayout), what=text)
    def alloc_weights(self, layout: WeightLayout, what: str) -> WeightArena:
        """Leases memory for a model's tensors, as `reserve_static` does, and takes addresses.

        No page exists until it is loaded. `what` names it for people. Raises NoRoomError.
        """
        return WeightArena(self._core, layout, what)

    @checked(others=each(instance_of(object)))
    def open_weight_links(
        self, others: Sequence[Client] = (), *, threads: int = 4, staging_bytes: int = STAGING_BYTES
    ) -> WeightLinks:
        """The ways over which `WeightArena.load` fills this client's arenas.

        On a GPU each link's `threads` fill buffers of pinned memory, `staging_bytes` in all, while
        the GPU fetches the others. `others` are clients on GPUs whose links to the host help from
        the start (`WeightLinks.add`), all or none. Raises as `add` does.
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
        """Gives its pages and its lease back; its address range is free with its last view."""
        self._check_owner(arena._client, "arena")
        arena.free()

    def _check_owner(self, owner: _core.Client, what: str) -> None:
        if owner is not self._core:
            raise InvalidArgumentError(f"the {what} is another client's; free it there")

    @checked(size_bytes=positive)
    def alloc_virtual_tensor(self, size_bytes: int) -> VirtualTensor:
        """Reserves address space, a multiple of the page size; nothing is resident."""
        return VirtualTensor(self._core, size_bytes)

    @checked(tensor=instance_of(VirtualTensor))
    def free_virtual_tensor(self, tensor: VirtualTensor) -> None:
        """Gives its pages back; its address range is free once the last view is gone."""
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
        """Virtual space for at least `num_tokens`, rounded up to whole slabs.

        Resident is nothing but the slabs of the first `reserved_blocks`, which raise NoRoomError
        if there is no room for them. Of a HybridLayout each group gets all of this for itself.
        """
        if isinstance(layout, HybridLayout):
            return KVCacheGroup(
                self._requester, self.page_bytes, layout, num_tokens, reserved_blocks
            )
        return KVCache(self._requester, self.page_bytes, layout, num_tokens, reserved_blocks)

    @checked(kvcache=instance_of(KVCache, KVCacheGroup))
    def free_kvcache(self, kvcache: KVCache | KVCacheGroup) -> None:
        """Gives its pages back; its address range is free once the last view is gone."""
        self._check_owner(kvcache._requester.core, "KV cache")
        kvcache._free()

    def close(self) -> None:
        """Gives everything back to the device. A second call does nothing.

        Raises PagesInUseError, and changes nothing, if the streams do not end in time, weights are
        being loaded or links to another GPU use this one's. Memory that is in use when the last
        reference goes is left to the end of the process.
        """
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
