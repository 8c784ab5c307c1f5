"""Memory that one engine needs and another holds for nothing: prefix cache, spare pages.

Engines are asked through the device's ledger (`kvcached.Device.request_room`), which wakes them
and knows what is on its way. The agent only says when, and never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvcached import Device, ShrinkOrder
from kvcached.errors import UnknownClientError
from prism.agent.pool import EnginePool, EngineProcess
from prism.agent.state import DeviceState
from prism.engines.ranks.launch import rank_name

log = logging.getLogger(__name__)


class PeerLedgers:
    """Kept open while the engine lives: as long, no agent replaces the ledger. For one loop."""

    def __init__(self, namespace: str, pool: EnginePool) -> None:
        self._namespace = namespace
        self._pool = pool
        self._open: dict[str, tuple[Device, ...]] = {}

    def of(self, engine: EngineProcess) -> Sequence[Device]:
        """By rank, from 1 on; empty for an engine on one device. Raises what
        `kvcached.Device.open` raises. REQUIRES: the engine's ranks have started."""
        if not engine.kind.peers:
            return ()
        for gone in [name for name in self._open if self._pool.get(name) is None]:
            del self._open[gone]
        if engine.id not in self._open:
            opened = (Device.open(name, namespace=self._namespace) for name in engine.kind.peers)
            self._open[engine.id] = tuple(opened)
        return self._open[engine.id]

    def free_bytes(self, engine: EngineProcess) -> int | None:
        """The least that is free for it on any of them; None for an engine on one device."""
        return min((device.usage().free_bytes for device in self.of(engine)), default=None)


@dataclass(slots=True)
class Flush:
    """An order to give everything back: calls `on_done(bytes)` once all have answered."""

    orders: list[ShrinkOrder]
    on_done: Callable[[int], None]
    returned_bytes: int = 0

    def poll(self) -> bool:
        """Whether this is over. One that is killed or too slow has given what it had given."""
        for order in list(self.orders):
            answers = order.poll()
            if answers is not None:
                self.orders.remove(order)
                self.returned_bytes += sum(answer.returned_bytes for answer in answers)
        if not self.orders:
            self.on_done(self.returned_bytes)
        return not self.orders


class Reclaimer:
    """Asks engines to give idle memory back, so that no model starves on another's cache."""

    def __init__(self, state: DeviceState, device: Device, peers: PeerLedgers) -> None:
        self._state = state
        self._device = device
        self._peers = peers
        self._flushes: list[Flush] = []

    def flush(self, engine_ids: Collection[str], on_done: Callable[[int], None]) -> None:
        """All idle memory of these engines; `on_done` gets the bytes that came back, in `tick`."""
        orders = (self._order(engine_id) for engine_id in engine_ids)
        self._flushes.append(Flush([order for order in orders if order], on_done))

    def tick(self) -> None:
        """Looks for answers; never waits."""
        self._flushes = [flush for flush in self._flushes if not flush.poll()]

    def reclaim(self, need_bytes: int, for_engine: str) -> None:
        """Ask others for `need_bytes`, by kvcached's default policy: spare pages first, then the
        caches of idle engines. What was asked for before and not answered is on its way. For an
        engine of several ranks, on each of their devices what is missing there."""
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
        """Room for so much KV, which the model's first waiting request lacks."""
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
            log.debug("%s ended before it could be asked", engine_id)
            return None
