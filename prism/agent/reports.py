"""What the cluster scheduler learns about this device."""

from __future__ import annotations

from collections import Counter

from kvcached import Device
from prism.agent.models import Served, Totals
from prism.agent.pool import Engine, EngineState
from prism.agent.state import State
from prism.messages import AgentReport, EngineStatus, ModelReport


def build_report(
    state: State,
    device: Device,
    waiting: Counter[str],
    *,
    epoch: int,
    time_unix_s: float,
    cancel_endpoint: str,
) -> AgentReport:
    """`waiting`: model -> requests in the mirror. An engine that died and is not replaced yet
    counts as starting."""
    usage = device.usage()
    pool, models = state.pool, state.models
    runs = Counter(run.request.model for run in state.running)
    reports = [
        _model_report(served, models.totals(name), pool.get(served.engine_id), waiting, runs)
        for name, served in models.served.items()
    ]
    return AgentReport(
        device=device.name,
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
        cancel_endpoint=cancel_endpoint,
        waiting_unplaced=sum(n for model, n in waiting.items() if model not in models.served),
    )


def _model_report(
    served: Served,
    totals: Totals,
    engine: Engine | None,
    waiting: Counter[str],
    runs: Counter[str],
) -> ModelReport:
    status = engine.status if engine and engine.status else EngineStatus(served.engine_id, None)
    activated = engine.activated if engine else None
    return ModelReport(
        model=served.name,
        state=served.state.value,
        waiting=waiting[served.name],
        running=runs[served.name],
        engine_id=served.engine_id,
        engine_pid=engine.pid if engine else 0,
        last_request_unix_s=totals.last_request_unix_s,
        prompt_tokens_total=totals.prompt_tokens,
        output_tokens_total=totals.output_tokens,
        finished_total=totals.finished,
        failed_total=totals.failed,
        kv_mapped_bytes=status.kv_mapped_bytes,
        kv_reserve_bytes=activated.reserve_bytes if activated else 0,
        static_bytes=status.static_bytes or (activated.static_bytes if activated else 0),
        maps_total=totals.maps,
        unmaps_total=totals.unmaps,
        retractions_total=totals.retractions,
        activation_s=served.activation_s,
        error=served.error,
        stages_s=served.stages_s,
        activations_total=totals.activations,
        peers=served.peers,
        link_bytes=activated.link_bytes if activated else {},
    )
