"""From reports, Redis and actions under way to the one ClusterView that policies plan on."""

from __future__ import annotations

from prism.cluster.agents import ABSENT_STATES
from prism.cluster.state import State
from prism.config import DeviceConfig
from prism.messages import AgentReport, ModelReport, ModelSpec
from prism.policies.data import ClusterView, GpuView, ModelView

_MOVING = {"activate": "activating", "evict": "draining"}


def build_view(state: State, now_s: float) -> ClusterView:
    """`now_s`: the monotonic clock of the state's times. An action under way shows as if its
    memory and engine were taken already, and given back only when it is over."""
    rates = state.rates.rates(now_s)
    models = tuple(_model(state, m, rates.get(m.name, 0.0), now_s) for m in state.config.models)
    gpus = tuple(_gpu(state, device, models) for device in state.config.devices)
    return ClusterView(now_s, models, gpus)


def home_of(state: State, name: str) -> tuple[str | None, str]:
    """(device, state) of a model in ModelView's terms."""
    move = state.moves.get(name)
    if move is not None and move.source is not None:
        return move.source, "migrating"
    if move is not None:
        return move.device, _MOVING[move.kind]
    for stage in ("active", "activating", "draining"):
        devices = state.book.where(name, stage)
        if devices:
            placed = state.placement.get(name)
            return (placed if placed in devices else devices[0]), stage
    return None, "absent"


def _model(state: State, spec: ModelSpec, rate: float, now_s: float) -> ModelView:
    device, stage = home_of(state, spec.name)
    size = state.sizes.of(spec.name)
    reports = _reports(state, spec.name)
    waiting = state.unplaced.get(spec.name, 0) + sum(m.waiting for _, m in reports)
    asked = spec.name in state.demands
    return ModelView(
        name=spec.name,
        weight_bytes=size.weight_bytes,
        token_bytes=spec.token_bytes,
        kv_floor_bytes=size.kv_floor_bytes,
        slo_ttft_s=spec.slo_ttft_s,
        slo_tpot_s=spec.slo_tpot_s,
        token_rate=rate,
        # An operator's activation counts like one request that waits.
        waiting=max(waiting, 1) if asked else waiting,
        running=sum(m.running for _, m in reports),
        idle_s=_idle_s(state, spec.name, now_s),
        device=device,
        state=stage,
        never_evict=spec.never_evict,
        pinned_device=state.demands.get(spec.name) or spec.pinned_device,
        static_share=spec.static_share,
        wanted=spec.name in state.wanted,
        barred=state.bars.devices(spec.name, now_s),
    )


def _reports(state: State, name: str) -> list[tuple[str, ModelReport]]:
    return [(r.device, m) for r in state.book.reports() for m in r.models if m.model == name]


def _idle_s(state: State, name: str, now_s: float) -> float:
    """Since the last request, or since the model became active if that was later.

    The agent's own clock dates its requests, so that clocks of two machines are never compared.
    """
    idle_s = now_s - state.activated_s.get(name, state.started_s)
    for device, model in _reports(state, name):
        report = state.book.report(device)
        if report is not None and model.last_request_unix_s > 0:
            since_s = report.time_unix_s - model.last_request_unix_s
            idle_s = min(idle_s, since_s + now_s - state.book.seen_s(device))
    return max(0.0, idle_s)


def _gpu(state: State, device: DeviceConfig, models: tuple[ModelView, ...]) -> GpuView:
    report = state.book.report(device.name)
    if report is None:
        return GpuView(
            device.name, device.capacity_bytes, engines_total=device.engines, alive=False
        )
    coming = [m for m in state.moves.values() if m.brings_up and m.device == device.name]
    unseen = [m.model for m in coming if state.book.state(device.name, m.model) == "absent"]
    pending_bytes = sum(_pending_bytes(state, device.name, m.model) for m in coming)
    return GpuView(
        name=device.name,
        capacity_bytes=report.capacity_bytes,
        fixed_bytes=_elsewhere_bytes(state, device.name, models, unseen),
        free_bytes=max(0, report.capacity_bytes - report.reserved_bytes - pending_bytes),
        engines_free=_engines_free(report) - len(unseen),
        engines_total=device.engines,
    )


def _engines_free(report: AgentReport) -> int:
    """The agent lets an activation wait for an engine that is starting; such a model may show in
    the report without holding an engine yet."""
    here = sum(m.state not in ABSENT_STATES for m in report.models)
    return min(report.engines_free + report.engines_starting, report.engines_total - here)


def _pending_bytes(state: State, device: str, name: str) -> int:
    """What a model on its way to the device will still reserve there."""
    model = state.book.model(device, name)
    held = model.static_bytes + model.kv_reserve_bytes if model else 0
    return max(0, state.sizes.of(name).total_bytes - held)


def _elsewhere_bytes(
    state: State, device: str, models: tuple[ModelView, ...], unseen: list[str]
) -> int:
    """Taken here by models whose ModelView stands on another device: copies on their way in
    or out."""
    return sum(
        model.weight_bytes + model.kv_floor_bytes
        for model in models
        if model.device != device
        and (model.name in unseen or state.book.state(device, model.name) != "absent")
    )
