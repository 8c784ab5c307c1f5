"""ServerlessLLM (OSDI 2024): a model is loaded when requests come, where it starts soonest, and
gives its GPU up when it is idle. GPUs are not shared: one instance each.

§5 names three ways to start a model: load it on a free server; reclaim an instance that has been
idle for its keep-alive; or, where its checkpoint is much closer to an occupied server, move the
instance there away (live migration) and take its place. The least estimated start-up time wins.
The Prism paper's published version compares against it.
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


@dataclass(frozen=True, slots=True)
class Start:
    """A way to bring a model up."""

    startup_s: float
    devices: tuple[str, ...]
    # What leaves these devices first.
    out: tuple[ModelView, ...] = ()
    # Where it moves to; None: it is evicted.
    refuge: str | None = None

    @property
    def rank(self) -> tuple[float, int, tuple[str, ...], str]:
        return (self.startup_s, len(self.out), self.devices, self.refuge or "")


@dataclass(slots=True)
class StartPlan:
    """A plan in the making."""

    view: ClusterView
    settings: Settings
    # Device -> what is there, with what the actions so far change: one instance, or more that an
    # operator has put there.
    held: dict[str, list[ModelView]]
    actions: list[Action] = field(default_factory=list)


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Start every model that requests wait for and that is nowhere, those with most waiting first;
    wanted ones on free devices only; then, if the engines can serve replicas, give a second device
    to models whose backlog is longer than what they run. Idle models stay until another one needs
    their device."""
    held: dict[str, list[ModelView]] = {}
    for model in view.models:
        for device in devices_of(model):
            held.setdefault(device, []).append(model)
    draft = StartPlan(view, settings, held)
    for model in sorted(_asked(view), key=lambda m: (-m.waiting, m.name)):
        starts = [s for s in _starts(draft, model) if not s.out or _urgent(model)]
        start = min(starts, key=lambda s: s.rank, default=None)
        if start is None:
            draft.actions.append(Refuse(model.name, _why_not(draft, model)))
        else:
            _begin(draft, model, start)
    if view.replicas:
        _scale_out(draft)
    return tuple(draft.actions)


def _asked(view: ClusterView) -> list[ModelView]:
    return [m for m in view.models if m.state == "absent" and (_urgent(m) or m.wanted)]


def _urgent(model: ModelView) -> bool:
    return model.waiting > 0 or model.never_evict


def _startup_s(model: ModelView, devices: tuple[str, ...]) -> float:
    """The slowest rank decides; 0 where nothing is known."""
    return max(model.startup_s.get(d, 0.0) for d in devices)


def _groups(draft: StartPlan, model: ModelView) -> Iterator[tuple[str, ...]]:
    """Devices that could hold the model: one of them, or `tp` in a row of one node."""
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
            yield from _displacing(draft, model, devices, next(iter(there.values())))


def _reclaimable(draft: StartPlan, model: ModelView) -> bool:
    """Idle for its keep-alive, which is as long as it takes to load (§7.1)."""
    if model.state != "active" or model.never_evict or model.running or model.waiting:
        return False
    keep_alive_s = max(_startup_s(model, devices_of(model)), draft.settings.min_idle_s)
    return model.idle_s >= keep_alive_s


def _displacing(
    draft: StartPlan, model: ModelView, devices: tuple[str, ...], other: ModelView
) -> Iterator[Start]:
    """Live migration: `other` comes up on a free device first, then `model` takes its place."""
    if other.state != "active" or other.tp > 1 or other.pinned_device is not None:
        return
    for gpu in draft.view.gpus:
        free = gpu.name not in draft.held and gpu.engines_free > 0
        if free and _could_hold(other, gpu):
            total_s = _startup_s(other, (gpu.name,)) + _startup_s(model, devices)
            yield Start(total_s, devices, (other,), gpu.name)


def _begin(draft: StartPlan, model: ModelView, start: Start) -> None:
    if start.refuge is not None:
        (other,) = start.out
        why = f"{model.name} starts sooner where it is: {start.startup_s:.2f} s"
        draft.actions.append(Migrate(other.name, start.devices[0], start.refuge, why))
        draft.held[start.refuge] = [other]
        return  # a later plan activates the model, once its device is free
    for other in start.out:
        why = f"idle for {other.idle_s:.1f} s, its device is wanted for {model.name}"
        draft.actions.append(Evict(other.name, devices_of(other)[0], why))
    why = "requests wait" if model.waiting else "never_evict" if model.never_evict else "wanted"
    reason = f"{why}; starts soonest here: {start.startup_s:.2f} s"
    first, *peers = start.devices
    draft.actions.append(Activate(model.name, first, reason, peers=tuple(peers)))
    draft.held.update({device: [model] for device in start.devices})


def _scale_out(draft: StartPlan) -> None:
    """One more instance for a model whose backlog exceeds what it runs, on free devices only."""
    by_name: dict[str, list[ModelView]] = {}
    for model in draft.view.models:
        by_name.setdefault(model.name, []).append(model)
    for name in sorted(by_name):
        views = by_name[name]
        if any(m.state != "active" for m in views):
            continue
        if views[0].waiting > sum(m.running for m in views) > 0:
            free = [s for s in _starts(draft, views[0]) if not s.out]
            if free:
                _begin(draft, views[0], min(free, key=lambda s: s.rank))


def _why_not(draft: StartPlan, model: ModelView) -> str:
    if not any(True for _ in _groups(draft, model)):
        return f"no device that answers has {size_text(need_bytes(model))} for it"
    return "every device serves a model that is busy or has not been idle for its keep-alive"
