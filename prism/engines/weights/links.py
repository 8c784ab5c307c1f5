"""Links over which an engine loads its weights: its own GPU's link to the host, and those of the
node's other GPUs, which forward their part to it (Prism §5.2). On a host device: threads.

The memory on another GPU (staging, and this process's CUDA context) is leased in that GPU's ledger
as evictable memory. It is released when an engine there is short of memory, when no load has used
it for `IDLE_S`, and with the engine.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import kvcached
from kvcached import KvcachedError, LoadOptions, StoredWeights, WeightArena
from prism.config.schema.machines import is_gpu
from prism.engines.core import EngineContext
from prism.engines.room import await_room

IDLE_S = 60.0
ROOM_S = 0.5  # time for others to make room
STAGING_BYTES = 32 << 20
THREADS_MIN, THREADS_MAX = 4, 16

log = logging.getLogger("prism.engine")


def helpers_of(context: EngineContext) -> tuple[str, ...]:
    """Returns the GPUs whose links this rank uses. All ranks of an engine load at once, each over
    its own link and its part of the links of GPUs without a rank."""
    engine, ranks = context.config.engine, context.ranks
    if engine.weight_links != "node" or not is_gpu(context.device):
        return ()
    taken = {context.device, *context.rank_devices}
    names = [d.name for d in context.config.devices if is_gpu(d.name)]
    return tuple([name for name in names if name not in taken][ranks.rank :: ranks.size])


def threads_of(ranks: int) -> int:
    """Returns the number of threads that fill a link's pinned memory, bounded by half of the cores,
    which the ranks share. They are a load's bottleneck: on an H200, four reach a quarter of the
    link's rate."""
    return max(THREADS_MIN, min(THREADS_MAX, len(os.sched_getaffinity(0)) // (2 * ranks)))


class LoadLinks:
    """Links of one rank, which stay open between loads. Thread rule: the engine's thread. `clock`
    returns monotonic seconds."""

    def __init__(
        self,
        context: EngineContext,
        client: kvcached.Client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._options = LoadOptions(
            threads=threads_of(context.ranks.size),
            bytes_per_s=context.config.engine.load_bytes_per_s,
        )
        self._clock = clock
        self._link_bytes = context.config.engine.link_bytes
        self._staging_bytes = min(STAGING_BYTES, self._link_bytes)
        self._links = client.open_weight_links(
            threads=self._options.threads, staging_bytes=self._staging_bytes
        )
        self._names = helpers_of(context)
        self._opening: dict[str, Future[kvcached.Client]] = {}
        self._helpers: dict[str, kvcached.Client] = {}
        self._used_s = clock()
        self._poll = select.epoll()
        self._poll.register(client.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while a ledger may ask this engine for memory, on
        its own or on other GPUs."""
        return self._poll.fileno()

    def prepare(self, size_bytes: int) -> None:
        """Starts to open links of other GPUs for a load of this size, if the load is large enough
        for the time that their contexts take."""
        missing = {*self._names} - self._helpers.keys() - self._opening.keys()
        if missing and size_bytes >= self._context.config.engine.links_from_bytes:
            threads = ThreadPoolExecutor(len(missing), "links")
            self._opening |= {name: threads.submit(self._open, name) for name in missing}
            threads.shutdown(wait=False)

    def load(
        self, arena: WeightArena, weights: StoredWeights, meanwhile: Callable[[], object]
    ) -> dict[str, int]:
        """Copies every tensor, and calls `meanwhile` during the copy. Returns the bytes loaded over
        each link.

        The configured rate applies to all links together. A GPU whose link cannot be opened is left
        out. If a link fails, the others load its part, and its GPU is no longer used. Raises the
        errors of `WeightArena.load`.
        """
        self.prepare(weights.size_bytes)
        self._add_opened()
        for client in self._helpers.values():
            client.publish_evictable(0)
        try:
            loading = arena.start_load(weights, self._options, self._links)
            meanwhile()
            loading.result()
        finally:
            self._mark_idle()
        for name, why in loading.lost_links.items():
            log.warning("%s failed in the middle of a load: %s", name, why)
            self._release(name)
        return loading.link_bytes

    def answer_requests(self) -> bool:
        """Releases memory on other GPUs if their ledgers ask for it or it is idle. Returns whether
        it released any. Called between two steps."""
        if self._opening and all(future.done() for future in self._opening.values()):
            self._add_opened()
            self._mark_idle()
        is_idle = self._clock() - self._used_s > IDLE_S
        released = [n for n, client in self._helpers.items() if is_idle or _is_requested(client)]
        for name in released:
            self._release(name)
        return bool(released)

    def close(self) -> None:
        """Closes all links. REQUIRES: no load runs."""
        self._add_opened()
        for name in list(self._helpers):
            self._release(name)
        self._links.close()
        self._poll.close()

    # --- other GPUs ------------------------------------------------------------------------

    def _open(self, name: str) -> kvcached.Client:
        """Opens a client on another GPU, in a thread. The CUDA context is created before its lease,
        so this waits for free memory first, from spare pages and prefix caches of others."""
        device = kvcached.Device.open(name, namespace=self._context.config.namespace)
        await_room(device, self._link_bytes, ROOM_S, only_offered=True)
        return device.client(f"{self._context.engine_id}.links")

    def _add_opened(self) -> None:
        """Waits for all GPUs that are being opened, and adds their links. A GPU that fails is left
        out."""
        opening, self._opening = self._opening, {}
        for name, future in opening.items():
            try:
                self._add(name, future.result())
            except KvcachedError as error:
                log.warning("the link of %s is not used to load weights: %s", name, error)

    def _add(self, name: str, client: kvcached.Client) -> None:
        try:
            self._links.add(client, share_bytes=self._link_bytes - self._staging_bytes)
        except KvcachedError:
            client.close()
            raise
        self._helpers[name] = client
        self._poll.register(client.fileno(), select.EPOLLIN)

    def _mark_idle(self) -> None:
        """Publishes the memory on other GPUs as evictable between loads."""
        self._used_s = self._clock()
        for client in self._helpers.values():
            client.publish_evictable(self._link_bytes)

    def _release(self, name: str) -> None:
        """Releases the memory on another GPU. If the GPU is lost or its ledger is gone, the memory
        is freed at the end of this process."""
        client = self._helpers.pop(name)
        self._poll.unregister(client.fileno())
        try:
            self._links.drop(client)
            client.close()  # answers the request; the client that asked may then remove the ledger
        except KvcachedError as error:
            log.warning("cannot release memory on %s: %s", name, error)
        log.info("closed the link over %s", name)


def _is_requested(client: kvcached.Client) -> bool:
    """Returns whether the ledger asks for the client's memory, or is gone."""
    try:
        return client.shrink_request() is not None
    except KvcachedError:
        return True
