"""Messages from engines, the scheduler and frontends, each to the part that handles it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import zmq.asyncio

from prism.agent.engines import EngineLink
from prism.agent.lifecycle import Lifecycle
from prism.agent.memory import Reclaimer
from prism.agent.models import Models, counters_of
from prism.agent.pool import Engine, EngineState
from prism.agent.prefetch import Prefetcher
from prism.agent.reporter import Reporter
from prism.agent.scheduler_link import Order, SchedulerLink
from prism.agent.serving import Serving
from prism.agent.state import State
from prism.messages import (
    ActionResult,
    Activated,
    ActivateModel,
    ActivationFailed,
    Cancel,
    Deactivated,
    Drain,
    EngineHello,
    EngineOutput,
    EngineStatus,
    EvictModel,
    Exported,
    FromEngine,
    ModelSpec,
    PrefetchModel,
    TrimModel,
)

log = logging.getLogger(__name__)


class EngineInbox:
    """What engines say. Messages of engines that are dead to us are dropped."""

    def __init__(
        self,
        state: State,
        link: EngineLink,
        lifecycle: Lifecycle,
        serving: Serving,
    ) -> None:
        self._state = state
        self._link = link
        self._lifecycle = lifecycle
        self._serving = serving

    async def run(self) -> None:
        while True:
            engine_id, message = await self._link.receive()
            engine = self._state.pool.get(engine_id)
            if engine is None:
                log.warning("dropped %s of unknown %s", type(message).__name__, engine_id)
                continue
            engine.seen_s = self._state.now_s()
            self._take(engine, message)

    def _take(self, engine: Engine, message: FromEngine) -> None:
        match message:
            case EngineOutput():
                self._serving.output(engine.id, message)
            case Exported(requests=requests):
                self._serving.moved(engine.id, requests)
            case EngineStatus():
                self._take_status(engine, message)
            case EngineHello(pid=pid):
                engine.pid = pid
                self._lifecycle.engine_ready(engine)
            case Activated():
                self._lifecycle.activated(engine, message)
            case ActivationFailed():
                self._lifecycle.activation_failed(engine, message)
            case Deactivated():
                self._lifecycle.deactivated(engine, message)

    def _take_status(self, engine: Engine, status: EngineStatus) -> None:
        engine.counters = counters_of(status)
        serves = engine.state in (EngineState.ACTIVE, EngineState.DRAINING)
        if serves and status.model == engine.model and engine.model is not None:
            engine.status = status
            self._state.running.status_came(engine.id)
            self._state.models.totals(engine.model).observe(status)
            if self._serving.has_waiting:
                self._serving.wake()


class OrderInbox:
    """What the scheduler orders. on_drain: (timeout in seconds, action to answer)."""

    def __init__(
        self,
        *,
        link: SchedulerLink,
        models: Models,
        lifecycle: Lifecycle,
        reclaimer: Reclaimer,
        prefetcher: Prefetcher,
        reporter: Reporter,
        on_drain: Callable[[float, int], None],
    ) -> None:
        self._link = link
        self._models = models
        self._lifecycle = lifecycle
        self._reclaimer = reclaimer
        self._prefetcher = prefetcher
        self._reporter = reporter
        self._on_drain = on_drain

    async def run(self) -> None:
        while True:
            order = await self._link.receive()
            log.info("order %s", _headline(order))
            self._take(order)

    def _take(self, order: Order) -> None:
        match order:
            case ActivateModel():
                self._lifecycle.activate(order)
            case EvictModel():
                self._lifecycle.evict(order)
            case PrefetchModel():
                self._prefetcher.hint(order)
            case TrimModel():
                self._trim(order)
            case Drain(action_id=action_id, timeout_s=timeout_s):
                self._on_drain(timeout_s, action_id)

    def _trim(self, order: TrimModel) -> None:
        """The engine of one model, or of all active ones."""
        served = self._models.served.values()
        names = [order.model] if order.model else [each.name for each in served]
        active = [found for name in names if (found := self._models.active(name)) is not None]
        if order.model and not active:
            self._reporter.answer(
                ActionResult(order.action_id, False, f"{order.model} is not active here")
            )
            return
        self._reclaimer.flush(
            [each.engine_id for each in active],
            lambda returned_bytes: self._reporter.answer(
                ActionResult(order.action_id, True, f"{returned_bytes} bytes returned")
            ),
        )


class CancelInbox:
    """What frontends cancel."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, serving: Serving) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._endpoint = endpoint
        self._serving = serving
        self._decoder = msgspec.msgpack.Decoder(Cancel)

    def bind(self) -> None:
        """Take the address, from a predecessor as well."""
        self._socket.bind(self._endpoint)

    async def run(self) -> None:
        """Malformed messages are logged and dropped."""
        while True:
            frame = await self._socket.recv()
            try:
                self._serving.cancel(self._decoder.decode(frame).request_ids)
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed cancellation: %s", error)

    def close(self) -> None:
        self._socket.close()


def _headline(order: Order) -> str:
    named = getattr(order, "model", "")
    model = named.name if isinstance(named, ModelSpec) else named
    reason = getattr(order, "reason", "")
    return f"{type(order).__name__} {model or ''} ({reason})"
