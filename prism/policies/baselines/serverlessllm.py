"""ServerlessLLM (OSDI 2024): models are loaded on demand, on the GPU where they start soonest.

An idle model may lose its GPU. GPUs are not shared: one instance each. §5 has three ways to start a
model: load it on a free server; reclaim an instance that has been idle for its keep-alive; or, if
its checkpoint is much closer to an occupied server, move that server's instance away (live
migration) and start there. The least estimated start-up time is chosen. The Prism paper's published
version compares against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prism.policies.bins import devices_of, need_bytes, size_text
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    Evict,
    GpuView,
    Migrate,
    ModelView,
    Refuse,
    Settings,
)
from prism.policies.policy import ADMISSION_ORDER, Policy


@dataclass(frozen=True, slots=True)
class Start:
    """Option to start a model."""

    startup_s: float
    devices: tuple[str, ...]
    # Models that leave these devices first.
    out: tuple[ModelView, ...] = ()
    # Device that the leaving model migrates to; None: models are evicted.
    migrate_to: str | None = None

    @property
    def rank(self) -> tuple[float, int, tuple[str, ...], str]:
        return (self.startup_s, len(self.out), self.devices, self.migrate_to or "")


@dataclass(slots=True)
class StartPlan:
    """Plan under construction."""

    view: ClusterView
    settings: Settings
    # Device -> its models after the actions so far: one instance, or more by an operator's command.
    held: dict[str, list[ModelView]]
    actions: list[Action] = field(default_factory=list)


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Starts absent models with waiting requests, most waiting first.

    Models that are only wanted are started on free devices only. Models with more waiting than
    running requests get another device, up to `replicas_max`. Idle models stay until another model
    needs their device.
    """
    held: dict[str, list[ModelView]] = {}
    for model in view.models:
        for device in devices_of(model):
            held.setdefault(device, []).append(model)
    draft = StartPlan(view, settings, held)
    for model in sorted(_asked(view), key=lambda m: -m.waiting):
        starts = [s for s in _starts(draft, model) if not s.out or _urgent(model)]
        start = min(starts, key=lambda s: s.rank, default=None)
        if start is None:
            draft.actions.append(Refuse(model.name, _why_not(draft, model)))
        else:
            _begin(draft, model, start)
    _scale_out(draft)
    return tuple(draft.actions)


def _asked(view: ClusterView) -> list[ModelView]:
    return [m for m in view.models if m.state == "absent" and (_urgent(m) or m.wanted)]


def _urgent(model: ModelView) -> bool:
    return model.waiting > 0 or model.never_evict


def _startup_s(model: ModelView, devices: tuple[str, ...]) -> float:
    """Returns the start-up time of the slowest rank; 0 if unknown."""
    return max(model.startup_s.get(d, 0.0) for d in devices)


def _groups(draft: StartPlan, model: ModelView) -> Iterator[tuple[str, ...]]:
    """Yields device groups that can hold the model: one device, or `tp` in a row of one node."""
    nodes: dict[str, list[GpuView]] = {}
    for gpu in sorted(draft.view.gpus, key=lambda g: g.name):
        nodes.setdefault(gpu.node if model.tp > 1 else gpu.name, []).append(gpu)
    for gpus in nodes.values():
        for first in range(0, len(gpus) - model.tp + 1, model.tp):
            group = gpus[first : first + model.tp]
            if all(_could_hold(model, gpu) for gpu in group):
                yield tuple(gpu.name for gpu in group)


def _could_hold(model: ModelView, gpu: GpuView) -> bool:
    if not gpu.alive or gpu.name in model.barred or gpu.engines_total <= 0:
        return False
    if model.pinned_device not in (None, gpu.name):
        return False
    return -(-need_bytes(model) // model.tp) <= gpu.capacity_bytes - gpu.fixed_bytes


def _starts(draft: StartPlan, model: ModelView) -> Iterator[Start]:
    engines = {g.name: g.engines_free for g in draft.view.gpus}
    for devices in _groups(draft, model):
        startup_s = _startup_s(model, devices)
        there = {id(m): m for d in devices for m in draft.held.get(d, ())}
        if any(engines[d] <= 0 for d in devices if d not in draft.held):
            continue
        if all(_reclaimable(draft, m) for m in there.values()):
            yield Start(startup_s, devices, tuple(there.values()))
        elif len(there) == 1 and model.tp == 1:
            yield from _migrations(draft, model, devices, next(iter(there.values())))


def _reclaimable(draft: StartPlan, model: ModelView) -> bool:
    """Returns True if the model has been idle for its keep-alive, which is its load time (§7.1)."""
    if model.state != "active" or model.never_evict or model.running or model.waiting:
        return False
    keep_alive_s = max(_startup_s(model, devices_of(model)), draft.settings.min_idle_s)
    return model.idle_s >= keep_alive_s


def _migrations(
    draft: StartPlan, model: ModelView, devices: tuple[str, ...], other: ModelView
) -> Iterator[Start]:
    """Yields live migrations of `other` to a free device, after which `model` replaces it."""
    if other.state != "active" or other.tp > 1 or other.pinned_device is not None:
        return
    for gpu in draft.view.gpus:
        free = gpu.name not in draft.held and gpu.engines_free > 0
        if free and _could_hold(other, gpu):
            total_s = _startup_s(other, (gpu.name,)) + _startup_s(model, devices)
            yield Start(total_s, devices, (other,), gpu.name)


def _begin(draft: StartPlan, model: ModelView, start: Start, *, joins: bool = False) -> None:
    if start.migrate_to is not None:
        (other,) = start.out
        why = f"{model.name} starts sooner on its device: {start.startup_s:.2f} s"
        draft.actions.append(Migrate(other.name, start.devices[0], start.migrate_to, why))
        draft.held[start.migrate_to] = [other]
        return  # a later plan activates the model, once its device is free
    for other in start.out:
        why = f"idle for {other.idle_s:.1f} s, its device is needed for {model.name}"
        draft.actions.append(Evict(other.name, devices_of(other)[0], why))
    why = "requests wait" if model.waiting else "never_evict" if model.never_evict else "wanted"
    reason = f"{why}; starts soonest here: {start.startup_s:.2f} s"
    first, *peers = start.devices
    activate = Activate(model.name, first, reason, peers=tuple(peers), joins=joins)
    draft.actions.append(activate)
    draft.held.update({device: [model] for device in start.devices})


def _scale_out(draft: StartPlan) -> None:
    """Starts one more instance, on free devices, of each model with more waiting than running."""
    by_name: dict[str, list[ModelView]] = {}
    for model in draft.view.models:
        by_name.setdefault(model.name, []).append(model)
    acting = {action.model for action in draft.actions}
    for name, views in by_name.items():
        if name in acting or any(m.state != "active" for m in views):
            continue
        backlog = sum(m.waiting for m in views) > sum(m.running for m in views) > 0
        if backlog and len(views) < views[0].replicas_max:
            free = [s for s in _starts(draft, views[0]) if not s.out]
            if free:
                _begin(draft, views[0], min(free, key=lambda s: s.rank), joins=True)


def _why_not(draft: StartPlan, model: ModelView) -> str:
    if not any(True for _ in _groups(draft, model)):
        return f"no device that answers has {size_text(need_bytes(model))} for it"
    return "every device serves a model that is busy or has not been idle for its keep-alive"


POLICY = Policy("serverlessllm", plan, frozenset({ADMISSION_ORDER}), asks_startup=True)
