"""Reports about this device to the cluster scheduler."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from kvcached import Device
from prism.agent.network.sockets import SchedulerLink
from prism.agent.state.device_state import DeviceState, HostedModel, ModelTotals
from prism.agent.state.engine_pool import EngineProcess, EngineState
from prism.config.schema.endpoints import node_of, on_node
from prism.messages.agent import ActionResult, AgentReport, ModelReport
from prism.messages.engine import EngineStatus
from prism.messages.gpu_memory import GpuMemory
from prism.transport import malformed_total

SETTLE_S = 0.01  # changes within this time are reported together


def build_report(
    state: DeviceState,
    device: Device,
    *,
    name: str,
    epoch: int,
    time_unix_s: float,
    gpu: GpuMemory | None = None,
) -> AgentReport:
    """Returns a report of the present state.

    Engines that died and have no successor yet count as starting.

    Args:
        name: the device's name in the cluster.
        gpu: the driver's figures.
    """
    usage = device.usage()
    pool, models = state.pool, state.models
    waiting, runs = state.requests.waiting_counts(), state.requests.running_counts()
    waits_s = state.requests.oldest_waits(time_unix_s)
    starting = Counter(r.request.model for r in state.requests.on_engines() if not r.prefilled)
    reports = [
        msgspec.structs.replace(
            _model_report(hosted, models.totals(model), pool.get(hosted.engine_id)),
            waiting=waiting[model],
            running=runs[model],
            starting=starting[model],
            oldest_wait_s=waits_s.get(model, 0.0),
            peers=tuple(on_node(peer, node_of(name)) for peer in hosted.peers),
        )
        for model, hosted in models.hosted.items()
    ]
    return AgentReport(
        device=name,
        epoch=epoch,
        time_unix_s=time_unix_s,
        capacity_bytes=usage.capacity_bytes,
        page_bytes=usage.page_bytes,
        reserved_bytes=usage.reserved_bytes,
        committed_bytes=usage.committed_bytes,
        resident_bytes=device.resident_bytes(),
        engines_free=pool.count(EngineState.FREE),
        engines_starting=pool.count(EngineState.STARTING) + pool.size - len(pool),
        engines_total=pool.size,
        models=reports,
        engine_restarts_total=pool.restarts_total,
        waiting_unplaced=sum(n for model, n in waiting.items() if model not in models.hosted),
        gpu=gpu,
        malformed_total=malformed_total() + state.requests.malformed_total,
    )


def _model_report(
    hosted: HostedModel, totals: ModelTotals, engine: EngineProcess | None
) -> ModelReport:
    status = engine.status if engine and engine.status else EngineStatus(hosted.engine_id, None)
    activated = engine.activated if engine else None
    token_bytes = engine.token_bytes if engine else 0
    return ModelReport(
        model=hosted.name,
        state=hosted.state.value,
        engine_id=hosted.engine_id,
        engine_pid=engine.pid if engine else 0,
        last_request_unix_s=totals.last_request_unix_s,
        prompt_tokens_total=totals.prompt_tokens,
        output_tokens_total=totals.output_tokens,
        finished_total=totals.finished,
        met_total=totals.met,
        failed_total=totals.failed,
        cancelled_total=totals.cancelled,
        kv_mapped_bytes=status.kv_mapped_bytes,
        kv_cached_bytes=status.evictable_tokens * token_bytes,
        kv_idle_bytes=status.free_mapped_tokens * token_bytes,
        kv_reserve_bytes=activated.reserve_bytes if activated else 0,
        static_bytes=status.static_bytes or (activated.static_bytes if activated else 0),
        maps_total=totals.maps,
        unmaps_total=totals.unmaps,
        retractions_total=totals.retractions,
        activation_s=hosted.activation_s,
        error=hosted.error,
        broken=hosted.broken,
        has_output=engine is not None and engine.has_output,
        stages_s=hosted.stages_s,
        activations_total=totals.activations,
        stages_total_s=dict(totals.stages_s),
        link_bytes=activated.link_bytes if activated else {},
        prefill_tokens_per_s=totals.prefill_tokens_per_s,
        step_s=totals.step_s,
        request_s=totals.request_s,
        output_lengths=list(totals.output_lengths.items()),
    )


class Reporter:
    """Sender of reports and answers. `build` returns a report of the present state."""

    def __init__(
        self, scheduler: SchedulerLink, build: Callable[[], AgentReport], interval_s: float
    ) -> None:
        self._scheduler = scheduler
        self._build = build
        self._interval_s = interval_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    def answer(self, result: ActionResult) -> None:
        """Sends a report, then the answer, so that the scheduler plans with the action's result."""
        self._scheduler.send(self._build())
        self._scheduler.send(result)

    async def run(self) -> None:
        while True:
            self._changed.clear()
            self._scheduler.send(self._build())
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(SETTLE_S)
