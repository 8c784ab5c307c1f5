"""Receivers of messages from engines, the scheduler, frontends and other agents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import zmq.asyncio

from prism.agent.engines.lifecycle import Lifecycle
from prism.agent.engines.reclaimer import Reclaimer
from prism.agent.engines.trace_file import TraceFile
from prism.agent.network.prefetch import Prefetcher
from prism.agent.network.sockets import EngineLink, SchedulerLink
from prism.agent.reports import Reporter
from prism.agent.requests.arrivals import Arrivals
from prism.agent.requests.controlled_steps import ControlledSteps
from prism.agent.requests.running import RunningRequests
from prism.agent.state.device_state import DeviceState, Models
from prism.agent.state.engine_pool import EngineProcess, EngineState, counters_of
from prism.config.schema.endpoints import local_name
from prism.config.schema.units import format_size
from prism.messages.agent import (
    ActionResult,
    ActivateModel,
    AgentCommand,
    Drain,
    EvictModel,
    PrefetchModel,
    TrimModel,
)
from prism.messages.engine import (
    Activated,
    ActivationFailed,
    Deactivated,
    EngineHello,
    EngineStatus,
    Exported,
    FromEngine,
    JobEnded,
)
from prism.messages.kv import KvPart, KvTaken
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Cancel, EngineOutput, Failure, FrontendGone, ToAgent
from prism.transport import Channel, count_malformed

log = logging.getLogger(__name__)


class EngineInbox:
    """Receiver of engines' messages. Messages of engines that were removed are dropped.

    Args:
        on_evicted: called when a model was evicted, so memory is free.
        trace: receives captured CUDA graphs.
        steps: receives the ends of jobs.
    """

    def __init__(
        self,
        state: DeviceState,
        engines: EngineLink,
        lifecycle: Lifecycle,
        running: RunningRequests,
        on_evicted: Callable[[], None],
        *,
        trace: TraceFile | None = None,
        steps: ControlledSteps | None = None,
    ) -> None:
        self._state = state
        self._engines = engines
        self._lifecycle = lifecycle
        self._running = running
        self._on_evicted = on_evicted
        self._trace = trace
        self._steps = steps

    async def run(self) -> None:
        while True:
            engine_id, message = await self._engines.receive()
            engine = self._state.pool.get(engine_id)
            if engine is None:
                log.warning("dropped %s of unknown %s", type(message).__name__, engine_id)
                continue
            engine.seen_s = self._state.now_s()
            self._take(engine, message)

    def _take(self, engine: EngineProcess, message: FromEngine) -> None:
        match message:
            case EngineOutput(failures=[Failure(blame="suspect" | "other", message=why) as it, *_]):
                self._lifecycle.engine_died(engine.id, why, by_request=it.blame == "suspect")
            case EngineOutput():
                self._take_output(engine, message)
            case Exported(requests=requests):
                self._running.moved(engine.id, requests)
            case JobEnded():
                if self._steps is not None:
                    self._steps.ended(engine.id, message)
                else:
                    self._running.prefill_ended(engine.id, lacks_memory=message.lacks_memory)
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
                if self._steps is not None:
                    self._steps.forget(engine.id)
                self._lifecycle.deactivated(engine, message)
                self._on_evicted()

    def _take_output(self, engine: EngineProcess, output: EngineOutput) -> None:
        self._running.output(engine.id, output)
        if output.chunks and not engine.has_output:
            self._lifecycle.first_output(engine)

    def _take_status(self, engine: EngineProcess, status: EngineStatus) -> None:
        engine.counters, engine.outside = counters_of(status), status.outside
        count_malformed(max(0, status.malformed_total - engine.malformed_total))
        engine.malformed_total = max(engine.malformed_total, status.malformed_total)
        serves = engine.state in (EngineState.ACTIVE, EngineState.DRAINING)
        if serves and status.model == engine.model and engine.model is not None:
            if self._trace is not None:
                known = len(engine.status.captures_s) if engine.status is not None else 0
                self._trace.captured(engine.id, engine.model, status.captures_s[known:])
            engine.status = status
            self._state.requests.mark_usage_reported(engine.id)
            self._state.models.totals(engine.model).observe(status)
            if self._state.requests.has_waiting:
                self._state.requests.wake()


class OrderInbox:
    """Receiver of the cluster scheduler's orders.

    Args:
        on_drain: called with (timeout in seconds, id of the action to answer).
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerLink,
        models: Models,
        lifecycle: Lifecycle,
        reclaimer: Reclaimer,
        prefetcher: Prefetcher,
        reporter: Reporter,
        on_drain: Callable[[float, int], None],
    ) -> None:
        self._scheduler = scheduler
        self._models = models
        self._lifecycle = lifecycle
        self._reclaimer = reclaimer
        self._prefetcher = prefetcher
        self._reporter = reporter
        self._on_drain = on_drain

    async def run(self) -> None:
        while True:
            order = _local(await self._scheduler.receive())
            log.info("order %s", _headline(order))
            self._take(order)

    def _take(self, order: AgentCommand) -> None:
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
        """Flushes the engine of one model, or of all active models."""
        hosted = self._models.hosted.values()
        names = [order.model] if order.model else [each.name for each in hosted]
        active = [found for name in names if (found := self._models.active(name)) is not None]
        if order.model and not active:
            self._reporter.answer(
                ActionResult(order.action_id, False, f"{order.model} is not active here")
            )
            return
        self._reclaimer.flush(
            [each.engine_id for each in active],
            lambda returned_bytes: self._reporter.answer(
                ActionResult(order.action_id, True, f"{format_size(returned_bytes)} returned")
            ),
        )


class CancelInbox:
    """Receiver of messages from frontends, launchers and agents of other machines.

    Args:
        on_gone: called with the id of a frontend whose end the launcher reports.
        on_kv: called with messages about KV from other machines.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoints: Sequence[str],
        arrivals: Arrivals,
        *,
        on_gone: Callable[[str], Coroutine[Any, Any, None]],
        on_kv: Callable[[KvPart | KvTaken], None],
        secret: str = "",
    ) -> None:
        self._channel = Channel[ToAgent](context, zmq.PULL, ToAgent, secret)
        self._endpoints = endpoints
        self._arrivals = arrivals
        self._on_gone, self._on_kv = on_gone, on_kv
        self._tasks: set[asyncio.Task[None]] = set()

    def bind(self) -> None:
        """Binds the addresses, taking them from a predecessor if necessary."""
        for endpoint in self._endpoints:
            self._channel.bind(endpoint)

    async def run(self) -> None:
        while True:
            _, message = await self._channel.receive()
            if isinstance(message, Cancel):
                self._arrivals.cancel(message.request_ids)
            elif isinstance(message, FrontendGone):
                task = asyncio.create_task(self._on_gone(message.frontend_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._on_kv(message)
                await asyncio.sleep(0)  # a part takes long enough to delay other tasks

    def close(self) -> None:
        self._channel.close()


def _local(order: AgentCommand) -> AgentCommand:
    """Returns the order with its peers' local names: all ranks are on this machine."""
    if isinstance(order, ActivateModel):
        return msgspec.structs.replace(order, peers=tuple(map(local_name, order.peers)))
    return order


def _headline(order: AgentCommand) -> str:
    named = getattr(order, "model", "")
    model = named.name if isinstance(named, ModelSpec) else named
    reason = getattr(order, "reason", "")
    return f"{type(order).__name__} {model or ''} ({reason})"
