"""A process's stake in a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, overload

from kvcached import _core
from kvcached.asking import NO_LIMIT, Asker, Want, wait_for
from kvcached.balloon import (
    ShrinkPolicy,
    ShrinkRequest,
    Shrunk,
    spares_then_idle_caches,
)
from kvcached.checks import not_negative, patience, positive
from kvcached.errors import NoRoomError
from kvcached.group import KVCacheGroup
from kvcached.kvcache import KVCache
from kvcached.layouts import HybridLayout, KVLayout
from kvcached.tensor import VirtualTensor
from kvcached.usage import ClientUsage
from kvcached.weights.arena import AddressUsage, WeightArena
from kvcached.weights.links import STAGING_BYTES, WeightLinks

if TYPE_CHECKING:
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


class Client:
    """One record in a device's ledger, and the memory charged to it.

    Made by `Device.client`. Closing it, or the death of its process, returns everything it holds.
    A forked child cannot use its parent's client (ForkedClientError); it opens its own. Used from
    one thread; several clients may live in one process.
    """

    def __init__(
        self,
        core: _core.Client,
        page_bytes: int,
        shrink_policy: ShrinkPolicy = spares_then_idle_caches,
    ) -> None:
        self._core = core
        self.page_bytes = page_bytes
        self._asker = Asker(core, shrink_policy)

    def usage(self) -> ClientUsage:
        """This client's record."""
        return ClientUsage.of(self._core.record())

    def set_limit(self, limit_bytes: int | None) -> None:
        """Bounds the client's pages (None: by the device alone). Takes effect at once.

        Below what is held it stops growth, spare pages go at once, and the rest is asked for: see
        `shrink_request`.
        """
        if limit_bytes is not None:
            not_negative("limit_bytes", limit_bytes)
        self._core.set_limit(limit_bytes)

    def set_min(self, min_bytes: int) -> None:
        """Guarantees pages: no other client can take them. NoRoomError if they are not free."""
        self._core.set_min(not_negative("min_bytes", min_bytes))

    def set_create_wait(self, max_wait_s: float) -> None:
        """How long a page that the ledger granted may take to be had. Default: 0.5 s.

        A GPU can be full in spite of the ledger: the driver has not freed the memory of a process
        that just died, or somebody uses the GPU outside of kvcached. The create is tried again, the
        caller waiting, and then there is no room: None or NoRoomError, with the driver's error.
        """
        self._core.set_create_wait(patience("max_wait_s", max_wait_s))

    def guard_holes(self) -> None:
        """From now on an address whose page is unmapped reads as zeros instead of faulting.

        For engines under MPS, where the illegal access of one ends all that share the GPU. Every
        hole shows one page of zeros that is only readable, or, on a driver without read-only
        mappings, that nobody may write. Leases that page as static memory (NoRoomError). Addresses
        that never held a page fault as before: no block that was ever handed out lies there. On a
        GPU each page that goes then costs a map and each run that comes an unmap more; the default
        is to fault, which finds the mistake.
        """
        self._core.guard_holes()

    def scrub_pages(self) -> None:
        """From now on pages are zeroed as they are unmapped, before anything else can have them.

        Without it a page shows what this client wrote there last, in whatever tensor; another
        client never sees it on a host device, and on a GPU as far as the driver clears memory,
        which CUDA does not promise. A process that is killed zeroes nothing.
        """
        self._core.scrub_pages()

    def set_streams(self, handles: Sequence[int], max_wait_s: float = 1.0) -> None:
        """Names the streams that the engine's work runs on; nothing is unmapped under that work.

        `handles` are CUstreams on a GPU (`torch.cuda.Stream.cuda_stream`; 0 is the default stream)
        and those of `kvcached.testing.HostStream` on a host device. From then on `free_kv` is
        called after the last work on its blocks was submitted, and the pages stay mapped and
        charged until everything submitted before is done. The blocks may be
        handed out again at once; with several streams it is the engine that orders work on one
        block. `trim`, unmapping and closing wait for the streams, at most `max_wait_s` each.
        The streams outlive the client, or `set_streams([])` comes first. Not during the capture of
        a graph, as nothing here. Without streams, the default, pages go at once: an engine on a
        GPU then synchronises before it frees.
        """
        self._core.set_streams(list(handles), patience("max_wait_s", max_wait_s))

    def reserve_static(self, size_bytes: int, what: str, *, wait_s: float = 0.0) -> StaticLease:
        """Leases memory outside of kvcached (torch's, say) before it is allocated.

        `what` names it for people. Limit and minimum do not apply. Raises NoRoomError, after asking
        others to shrink and waiting for up to `wait_s` as `KVCache.alloc_kv` does.
        """
        positive("size_bytes", size_bytes)
        if patience("wait_s", wait_s) == 0:
            return StaticLease(self._core, size_bytes, what)

        def take() -> StaticLease | None:
            try:
                return StaticLease(self._core, size_bytes, what)
            except NoRoomError:
                return None

        want = Want(self._asker, lambda: size_bytes, is_static=True)
        return wait_for(want, take, wait_s) or StaticLease(self._core, size_bytes, what)

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
        return ShrinkRequest(number, None if size_bytes == NO_LIMIT else size_bytes)

    def answer(self, request: ShrinkRequest, shrunk: Shrunk) -> None:
        """Says that all was given that could be; whoever waits goes on, or asks somebody else."""
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
        request = self.shrink_request()
        if request is None:
            return None
        shrunk = shrink(request.size_bytes) if shrink else Shrunk()
        self.answer(request, shrunk)
        return shrunk

    def publish_evictable(self, size_bytes: int) -> None:
        """Tells the others how many bytes of prefix cache this client could give up.

        They ask nobody for more than that; `KVCache.evictable_bytes` knows it to the page.
        """
        _core.publish_evictable(self._core, not_negative("size_bytes", size_bytes))

    def reserve_addresses(self, size_bytes: int) -> None:
        """Reserves, once, the addresses that KV caches, weights and tensors are laid out in from
        then on, model after model (Prism §5.2). A multiple of the page size.

        A range is free again when its last view is gone. What finds no range gets a reservation of
        its own, as everything does without this call. Raises InvalidArgumentError, AlignmentError.
        """
        self._core.reserve_addresses(positive("size_bytes", size_bytes))

    def addresses(self) -> AddressUsage | None:
        """The space that `reserve_addresses` made; None before."""
        sizes = self._core.addresses()
        return None if sizes is None else AddressUsage(*sizes)

    def alloc_weights(self, layout: WeightLayout, what: str) -> WeightArena:
        """Leases memory for a model's tensors, as `reserve_static` does, and takes addresses.

        No page exists until it is loaded. `what` names it for people. Raises NoRoomError.
        """
        return WeightArena(self._core, layout, what)

    def open_weight_links(
        self,
        others: Sequence[Client] = (),
        *,
        threads: int = 4,
        staging_bytes: int = STAGING_BYTES,
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

    def free_weights(self, arena: WeightArena) -> None:
        """Gives its pages and its lease back; its address range is free with its last view."""
        arena.free()

    def alloc_virtual_tensor(self, size_bytes: int) -> VirtualTensor:
        """Reserves address space, a multiple of the page size; nothing is resident."""
        positive("size_bytes", size_bytes)
        return VirtualTensor(_core.VirtualTensor.create(self._core, size_bytes))

    def free_virtual_tensor(self, tensor: VirtualTensor) -> None:
        """Gives its pages back; its address range is free once the last view is gone."""
        tensor._free()

    @overload
    def alloc_kvcache(
        self, layout: KVLayout, num_tokens: int, *, reserved_blocks: int = 1
    ) -> KVCache: ...

    @overload
    def alloc_kvcache(
        self, layout: HybridLayout, num_tokens: int, *, reserved_blocks: int = 1
    ) -> KVCacheGroup: ...

    def alloc_kvcache(
        self, layout: KVLayout | HybridLayout, num_tokens: int, *, reserved_blocks: int = 1
    ) -> KVCache | KVCacheGroup:
        """Virtual space for at least `num_tokens`, rounded up to whole slabs.

        Resident is nothing but the slabs of the first `reserved_blocks`, which raise NoRoomError
        if there is no room for them. Of a HybridLayout each group gets all of this for itself.
        """
        if isinstance(layout, HybridLayout):
            return KVCacheGroup(self._asker, self.page_bytes, layout, num_tokens, reserved_blocks)
        return KVCache(self._asker, self.page_bytes, layout, num_tokens, reserved_blocks)

    def free_kvcache(self, kvcache: KVCache | KVCacheGroup) -> None:
        """Gives its pages back; its address range is free once the last view is gone."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
