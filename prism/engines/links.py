"""The ways over which an engine's weights come: its own GPU's link to the host, and those of the
node's other GPUs, which hand their part on to it (Prism §5.2). On a host device: threads.

What this takes on another GPU (staging, and this process's CUDA context) is leased in that GPU's
ledger as memory that can be given back: it goes when an engine there is short of memory, when no
load has used it for `IDLE_S`, and with the engine.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import kvcached
from kvcached import KvcachedError, LoadOptions, StoredWeights, WeightArena
from prism.config.machines import is_gpu
from prism.engines.core import EngineContext
from prism.engines.room import await_room

IDLE_S = 60.0
ROOM_S = 0.5  # for others to make room
STAGING_BYTES = 32 << 20

log = logging.getLogger("prism.engine")


def helpers_of(context: EngineContext) -> tuple[str, ...]:
    """The GPUs whose links help this engine, or this rank of it: ranks load at once, each over its
    own link and its part of those that no rank has."""
    engine, ranks = context.config.engine, context.ranks
    if engine.weight_links != "node" or not is_gpu(context.device):
        return ()
    taken = {context.device, *context.rank_devices}
    names = [d.name for d in context.config.devices if is_gpu(d.name)]
    return tuple([name for name in names if name not in taken][ranks.rank :: ranks.size])


class LoadLinks:
    """Kept from load to load. Thread rule: the engine's thread; `clock` gives monotonic seconds."""

    def __init__(
        self,
        context: EngineContext,
        client: kvcached.Client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._options = LoadOptions(bytes_per_s=context.config.engine.load_bytes_per_s)
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
        """Readable while the engine or what it has on other GPUs may be asked for memory."""
        return self._poll.fileno()

    def prepare(self, size_bytes: int) -> None:
        """A load of this size will come: begin to open what other GPUs can lend, if it is worth
        their contexts, which take a while."""
        missing = {*self._names} - self._helpers.keys() - self._opening.keys()
        if missing and size_bytes >= self._context.config.engine.links_from_bytes:
            threads = ThreadPoolExecutor(len(missing), "links")
            self._opening |= {name: threads.submit(self._open, name) for name in missing}
            threads.shutdown(wait=False)

    def load(
        self, arena: WeightArena, weights: StoredWeights, meanwhile: Callable[[], object]
    ) -> dict[str, int]:
        """Copies every tensor, with `meanwhile` beside it; bytes that each link brought.

        The configured rate holds over all links together. A GPU that cannot lend its link is left
        out; one that fails leaves its part to the others, and is given up. Raises as
        `WeightArena.load` does.
        """
        self.prepare(weights.size_bytes)
        self._join()
        for client in self._helpers.values():
            client.publish_evictable(0)
        try:
            loading = arena.start_load(weights, self._options, self._links)
            meanwhile()
            loading.result()
        finally:
            self._rest()
        for name, why in loading.lost_links.items():
            log.warning("%s failed in the middle of a load: %s", name, why)
            self._give_back(name)
        return loading.link_bytes

    def answer_requests(self) -> bool:
        """Between two steps: give back what is asked for on other GPUs, or all that lies idle.
        Whether there was anything."""
        if self._opening and all(future.done() for future in self._opening.values()):
            self._join()
            self._rest()
        is_idle = self._clock() - self._used_s > IDLE_S
        asked = [n for n, client in self._helpers.items() if is_idle or _is_asked(client)]
        for name in asked:
            self._give_back(name)
        return bool(asked)

    def close(self) -> None:
        """REQUIRES: no load runs"""
        self._join()
        for name in list(self._helpers):
            self._give_back(name)
        self._links.close()
        self._poll.close()

    # --- other GPUs ------------------------------------------------------------------------

    def _open(self, name: str) -> kvcached.Client:
        """In a thread. The context comes before its lease, so nothing is begun without room; spare
        pages and prefix cache of others make some."""
        device = kvcached.Device.open(name, namespace=self._context.config.namespace)
        await_room(device, self._link_bytes, ROOM_S, only_offered=True)
        return device.client(f"{self._context.engine_id}.links")

    def _join(self) -> None:
        """Every GPU that is being opened helps from now on, or is left out."""
        opening, self._opening = self._opening, {}
        for name, future in opening.items():
            try:
                self._add(name, future.result())
            except KvcachedError as error:
                log.warning("%s does not help to load weights: %s", name, error)

    def _add(self, name: str, client: kvcached.Client) -> None:
        try:
            self._links.add(client, share_bytes=self._link_bytes - self._staging_bytes)
        except KvcachedError:
            client.close()
            raise
        self._helpers[name] = client
        self._poll.register(client.fileno(), select.EPOLLIN)

    def _rest(self) -> None:
        """Between loads all of it can be had by others."""
        self._used_s = self._clock()
        for client in self._helpers.values():
            client.publish_evictable(self._link_bytes)

    def _give_back(self, name: str) -> None:
        """What a GPU that is lost, or whose ledger is gone, does not take back ends with this
        process."""
        client = self._helpers.pop(name)
        self._poll.unregister(client.fileno())
        try:
            self._links.drop(client)
            client.close()  # which is the answer: who asked may remove the ledger upon it
        except KvcachedError as error:
            log.warning("%s is not left in order: %s", name, error)
        log.info("what loads over %s took there is given back", name)


def _is_asked(client: kvcached.Client) -> bool:
    """Also when the ledger is gone."""
    try:
        return client.shrink_request() is not None
    except KvcachedError:
        return True
