"""Builder of the ClusterView that policies plan on, from reports, Redis and current actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from prism.cluster.state.actions import Move
from prism.cluster.state.agents import ABSENT_STATES, AgentBook
from prism.cluster.state.scheduler_state import SchedulerState
from prism.cluster.state.sizes import Sizes
from prism.config.schema.cluster_config import DeviceConfig
from prism.messages.agent import AgentReport, ModelReport
from prism.messages.model_spec import ModelSpec
from prism.policies.bins import devices_of
from prism.policies.data import NO_TRAFFIC, ClusterView, Degree, GpuView, ModelView, Traffic
from prism.scheduler.traffic import share_of

_MOVING = {"activate": "activating", "evict": "draining"}


def build_view(state: SchedulerState, now_s: float) -> ClusterView:
    """Returns the view at `now_s`, on the state's clock.

    Memory and engine of an action in progress count as taken from its start to its end.
    """
    rates = state.rates.rates(now_s)
    models = tuple(
        view
        for spec in state.config.models
        for view in _views(state, spec, rates.get(spec.name, 0.0), now_s)
    )
    here = _by_device(state.book, state.actions.moves.values(), models)
    gpus = tuple(_gpu(state, device, here[device.name]) for device in state.config.devices)
    return ClusterView(
        now_s,
        models,
        gpus,
        target=state.target,
        queues=state.queues,
        turns=state.turns,
        unbound=state.routes.unplaced if state.policy.binds_requests else {},
    )


def copies_of(state: SchedulerState, name: str) -> list[tuple[tuple[str, ...], str]]:
    """Returns (devices, state) of each copy of a model; rank 0 is first, states as in ModelView.

    Copies without a route are included only if their agent restarts them, or without any other.
    """
    move, reports = state.actions.moves.get(name), state.book.of(name)
    if move is None and not reports:
        return []
    ends = (*move.devices, move.source) if move is not None else ()
    placed = state.routes.placement.get(name, ())
    reviving = state.routes.reviving.get(name, frozenset())
    shown = (*placed, *sorted(reviving.difference(placed)))
    routed = [device for device in shown if device not in ends]
    found = [
        (_ranks(state.book, device, name), stage)
        for device in routed
        if (stage := state.book.state(device, name)) != "absent"
    ]
    if move is not None and move.source is not None:
        return [*found, (_ranks(state.book, move.source, name), "migrating")]
    if move is not None:
        return [*found, (move.devices, _MOVING[move.kind])]
    for stage in ("active", "activating", "draining"):
        if any(known == stage for _, known in found):
            break
        if device := next((d for d, model in reports if model.state == stage), None):
            return [(_ranks(state.book, device, name), stage)]
    return found


def _ranks(book: AgentBook, device: str, name: str) -> tuple[str, ...]:
    return (device, *book.peers(device, name))


def _views(state: SchedulerState, spec: ModelSpec, rate: float, now_s: float) -> list[ModelView]:
    """Returns one view per copy, with an equal share of the rate, or one of an absent model."""
    found, reports = copies_of(state, spec.name), state.book.of(spec.name)
    if len(found) < 2:
        copies = [Copy(*found[0], reports) if found else Copy((), "absent", reports)]
    else:
        copies = [Copy(d, stage, [r for r in reports if r[0] == d[0]]) for d, stage in found]
    traffic = share_of(state.traffic.of(spec.name, now_s), len(copies))
    views = (_model(state, spec, now_s, rate / len(copies), copy) for copy in copies)
    return [structs.replace(view, traffic=traffic) for view in views]


class Copy(NamedTuple):
    """Copy of a model, with its reports."""

    devices: tuple[str, ...]  # rank 0 first
    stage: str
    reports: list[tuple[str, ModelReport]]  # (device, report)


def _model(
    state: SchedulerState, spec: ModelSpec, now_s: float, rate: float, copy: Copy
) -> ModelView:
    devices, stage, reports = copy
    move = state.actions.moves.get(spec.name)
    tp, sizes = _tp(state.book, spec, devices), state.sizes.of(spec.name)
    size = sizes[tp]
    waiting, running = _requests(state, spec.name, copy)
    demands = state.demands.activations
    moving = move is not None and stage == "migrating"
    return ModelView(
        name=spec.name,
        weight_bytes=size.weight_bytes,
        token_bytes=size.token_bytes,
        kv_floor_bytes=size.kv_floor_bytes,
        slo_ttft_s=spec.slo_ttft_s,
        slo_tpot_s=spec.slo_tpot_s,
        token_rate=rate,
        # An operator's activation counts as one waiting request.
        waiting=max(waiting, 1) if spec.name in demands else waiting,
        running=running,
        idle_s=_idle_s(state, spec.name, reports, now_s),
        owes_s=state.activations.owes_s(spec.name, now_s),
        device=devices[0] if devices else None,
        state=stage,
        never_evict=spec.never_evict,
        pinned_device=demands.get(spec.name) or spec.pinned_device,
        static_share=spec.static_share,
        wanted=spec.name in state.startup.wanted,
        deferred=spec.name in state.startup.deferred,
        barred=state.activations.barred(spec.name, now_s),
        tp=tp,
        peers=devices[1:],
        moving_to=move.devices if move is not None and moving else (),
        replicas_min=spec.replicas_min,
        replicas_max=spec.replicas_max,
        oldest_wait_s=_oldest_wait_s(state.book, reports, now_s),
        load_s=state.activations.load_s.get(spec.name, 0.0),
        degrees={
            n: Degree(
                each.weight_bytes,
                each.token_bytes,
                each.kv_floor_bytes,
                *state.speeds.of(spec, n),
            )
            for n, each in sizes.items()
        },
        share_bytes=size.share_bytes if len(sizes) > 1 else 0,
        expected=_expected(spec),
        startup_s=state.starts.of(spec, state.config) if state.policy.asks_startup else {},
    )


def _requests(state: SchedulerState, name: str, copy: Copy) -> tuple[int, int]:
    """Returns the numbers of waiting and of running requests.

    Requests that are bound to devices do not wait for a copy in particular. Those that were moved
    to its device count as running, since a report may be older than the move.
    """
    unplaced = state.routes.unplaced.get(name, 0)
    waiting = sum(m.waiting for _, m in copy.reports)
    if state.policy.binds_requests and copy.devices:
        return waiting, state.waiting.open.get(copy.devices[0], 0)
    return unplaced + waiting, sum(m.running for _, m in copy.reports)


def _expected(spec: ModelSpec) -> Traffic:
    load = spec.expected
    if load is None:
        return NO_TRAFFIC
    return Traffic(
        mean_rps=load.rate_rps, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens
    )


def _tp(book: AgentBook, spec: ModelSpec, devices: tuple[str, ...]) -> int:
    """Returns the degree of a copy by its report, or else by its devices; the least one of an
    absent model, and if there are several copies on the devices (`Actuator.evict_all`)."""
    is_reported = devices and book.state(devices[0], spec.name) != "absent"
    tp = 1 + len(book.peers(devices[0], spec.name)) if is_reported else len(devices)
    return tp if tp in spec.possible_degrees else spec.tp


def _idle_s(
    state: SchedulerState, name: str, reports: list[tuple[str, ModelReport]], now_s: float
) -> float:
    """Returns the time since the last request or the model's activation, whichever is later.

    A request's age is taken on its agent's clock, so that clocks of two machines are never
    compared.
    """
    idle_s = state.activations.idle_s(name, now_s)
    for device, model in reports:
        report = state.book.report(device)
        if report is not None and model.last_request_unix_s > 0:
            since_s = report.time_unix_s - model.last_request_unix_s
            idle_s = min(idle_s, since_s + now_s - state.book.seen_s(device))
    return max(0.0, idle_s)


def _oldest_wait_s(book: AgentBook, reports: list[tuple[str, ModelReport]], now_s: float) -> float:
    """Returns the longest wait, assuming that no request has started since the reports."""
    waits = [
        model.oldest_wait_s + now_s - book.seen_s(device)
        for device, model in reports
        if model.waiting
    ]
    return max(waits, default=0.0)


@dataclass(slots=True)
class _Device:
    """Models of a device, by name."""

    shown: set[str] = field(default_factory=set)  # those whose ModelView is on the device
    # Degree of those with a rank here, from reports.
    reported: dict[str, int] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)  # those with a rank above 0 here, or activating
    coming: list[Move] = field(default_factory=list)  # actions that activate a model here


def _by_device(
    book: AgentBook, moves: Iterable[Move], models: Iterable[ModelView]
) -> defaultdict[str, _Device]:
    """Returns the models of each device. One pass, since there are many devices and models."""
    found: defaultdict[str, _Device] = defaultdict(_Device)
    for view in models:
        for device in devices_of(view):
            found[device].shown.add(view.name)
    for report in book.reports():
        for model in report.models:
            if model.state not in ABSENT_STATES:
                found[report.device].reported[model.model] = model.tp
                for device in model.peers:
                    found[device].reported[model.model] = model.tp
                    found[device].peers.add(model.model)
    for move in moves:
        if move.brings_up:
            for device in move.devices:
                found[device].coming.append(move)
            for device in move.peers:
                found[device].peers.add(move.model)
    return found


def _gpu(state: SchedulerState, device: DeviceConfig, here: _Device) -> GpuView:
    report = state.book.report(device.name)
    if report is None:
        return GpuView(
            device.name,
            device.models_bytes,
            engines_total=device.engines,
            alive=False,
            drained=device.name in state.demands.drained,
            node=device.node,
        )
    coming = here.coming
    unseen = {
        m.model: len(m.devices) for m in coming if state.book.state(m.device, m.model) == "absent"
    }
    taking_engine = {m.model for m in coming if m.device == device.name} & unseen.keys()
    pending_bytes = sum(_pending_bytes(state.book, state.sizes, m) for m in coming)
    pending_bytes += report.engines_starting * device.idle_bytes
    held_bytes = report.reserved_bytes - sum(map(_returnable_bytes, report.models))
    return GpuView(
        name=device.name,
        # The capacity for models excludes what engine processes without a model use.
        capacity_bytes=max(0, report.capacity_bytes - device.engines_bytes),
        fixed_bytes=_elsewhere_bytes(state.sizes, here, unseen),
        free_bytes=max(0, report.capacity_bytes - held_bytes - pending_bytes),
        engines_free=_engines_free(report) - len(taking_engine | here.peers),
        engines_total=device.engines,
        alive=device.name not in state.demands.drained,
        drained=device.name in state.demands.drained,
        node=device.node,
    )


def _returnable_bytes(model: ModelReport) -> int:
    """Returns the memory of unused cached prefixes, which the engine drops for other models.

    It keeps its reserve. Ranks above 0 are not counted.
    """
    return min(model.kv_cached_bytes, max(0, model.kv_mapped_bytes - model.kv_reserve_bytes))


def _engines_free(report: AgentReport) -> int:
    """Returns the number of engines that models can take, including engines that are starting.

    Activations wait for starting engines. Models that wait for an engine are in the report, too.
    """
    here = sum(m.state not in ABSENT_STATES for m in report.models)
    return min(report.engines_free + report.engines_starting, report.engines_total - here)


def _pending_bytes(book: AgentBook, sizes: Sizes, move: Move) -> int:
    """Returns the bytes that an activating model will still reserve on each of its devices."""
    model = book.model(move.device, move.model)
    held = model.static_bytes + model.kv_reserve_bytes if model else 0
    return max(0, sizes.part_bytes(move.model, len(move.devices)) - held)


def _elsewhere_bytes(sizes: Sizes, here: _Device, unseen: Mapping[str, int]) -> int:
    """Returns the bytes here of models whose ModelView is on other devices.

    These are copies that are being activated or evicted.

    Args:
        unseen: Degrees of models that will be here and are not in reports.
    """
    degrees = {**unseen, **here.reported}
    away = degrees.keys() - here.shown
    return sum(sizes.part_bytes(name, degrees[name]) for name in away)
