"""Reclaiming of idle memory (prefix cache, spare pages) from engines for one that needs it.

Requests go through the device's ledger (`kvcached.Device.request_room`), which wakes the engines
and counts what was requested before. The agent only decides when, and never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvcached import Device, ShrinkOrder
from kvcached.errors import UnknownClientError
from prism.agent.state.device_state import DeviceState
from prism.agent.state.engine_pool import EnginePool, EngineProcess
from prism.engines.processes.rank_launch import rank_name

log = logging.getLogger(__name__)


class PeerLedgers:
    """Ledgers of the devices of engines' other ranks. For one event loop.

    A ledger is kept open while its engine lives, so that no agent replaces it.
    """

    def __init__(self, namespace: str, pool: EnginePool) -> None:
        self._namespace = namespace
        self._pool = pool
        self._open: dict[str, tuple[Device, ...]] = {}

    def of(self, engine: EngineProcess) -> Sequence[Device]:
        """Returns the engine's other devices by rank, from 1 on; none for an engine on one device.

        Raises what `kvcached.Device.open` raises. REQUIRES: the engine's ranks have started.
        """
        if not engine.kind.peers:
            return ()
        for gone in [name for name in self._open if self._pool.get(name) is None]:
            del self._open[gone]
        if engine.id not in self._open:
            opened = (Device.open(name, namespace=self._namespace) for name in engine.kind.peers)
            self._open[engine.id] = tuple(opened)
        return self._open[engine.id]

    def free_bytes(self, engine: EngineProcess) -> int | None:
        """Returns the least free memory on the other devices, None for an engine on one device."""
        return min((device.usage().free_bytes for device in self.of(engine)), default=None)


@dataclass(slots=True)
class Flush:
    """Orders to several engines to return all idle memory."""

    orders: list[ShrinkOrder]  # unanswered ones
    on_done: Callable[[int], None]  # called with the returned bytes after the last answer
    returned_bytes: int = 0

    def poll(self) -> bool:
        """Collects answers and returns whether all have come.

        For an engine that died or is too slow, the memory returned until then counts.
        """
        for order in list(self.orders):
            answers = order.poll()
            if answers is not None:
                self.orders.remove(order)
                self.returned_bytes += sum(answer.returned_bytes for answer in answers)
        if not self.orders:
            self.on_done(self.returned_bytes)
        return not self.orders


class Reclaimer:
    """Requests idle memory from engines, so that caches of one model do not starve another."""

    def __init__(self, state: DeviceState, device: Device, peers: PeerLedgers) -> None:
        self._state = state
        self._device = device
        self._peers = peers
        self._flushes: list[Flush] = []

    def flush(self, engine_ids: Collection[str], on_done: Callable[[int], None]) -> None:
        """Requests all idle memory of these engines. `tick` calls `on_done(returned bytes)`."""
        orders = (self._order(engine_id) for engine_id in engine_ids)
        self._flushes.append(Flush([order for order in orders if order], on_done))

    def tick(self) -> None:
        """Checks for answers without waiting."""
        self._flushes = [flush for flush in self._flushes if not flush.poll()]

    def reclaim(self, need_bytes: int, for_engine: str) -> None:
        """Requests `need_bytes` from other engines for this one.

        kvcached's default policy takes spare pages first, then caches of idle engines, and counts
        requests that are not answered yet. For an engine of several ranks, the memory missing on
        each of their devices is requested there.
        """
        if need_bytes <= 0:
            return
        engine = self._state.pool.get(for_engine)
        others = self._peers.of(engine) if engine else ()
        if not others:
            self._ask(self._device, need_bytes, for_engine)
            return
        names = [for_engine, *(rank_name(for_engine, rank) for rank in range(1, 1 + len(others)))]
        for device, name in zip([self._device, *others], names, strict=True):
            self._ask(device, need_bytes - device.usage().free_bytes, name)

    def reclaim_tokens(self, tokens: int, model: str) -> None:
        """Requests memory for KV tokens that the model's first waiting request lacks."""
        hosted = self._state.models.active(model)
        engine = self._state.pool.get(hosted.engine_id) if hosted else None
        if engine is not None and engine.activated is not None:
            quanta = -(-tokens // engine.activated.quantum_tokens)
            self.reclaim(quanta * engine.activated.quantum_bytes, engine.id)

    def _ask(self, device: Device, need_bytes: int, for_client: str) -> None:
        if need_bytes > 0:
            within_s = self._state.timing.reclaim_s
            device.request_room(need_bytes, for_client=for_client, within_s=within_s)

    def _order(self, engine_id: str) -> ShrinkOrder | None:
        try:
            return self._device.order_shrink(engine_id, wait_s=self._state.timing.flush_s)
        except UnknownClientError:
            log.debug("%s ended before its memory could be requested", engine_id)
            return None
