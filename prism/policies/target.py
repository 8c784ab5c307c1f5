"""Policies whose placement is searched offline: bring the cluster to `ClusterView.target` and keep
it there. Nothing is evicted for load; a model leaves a device only when the target moves it.

Used by muxserve, muxserve++, alpaserve and seallm (SeaLLM §5: services move once their new homes
are ready, and old engines stop then).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prism.policies.bins import asked_for, devices_of, size_text
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    Evict,
    Migrate,
    ModelView,
    Refuse,
    Settings,
)
from prism.policies.placement import Hosted, Placement

Devices = tuple[str, ...]


@dataclass(slots=True)
class TargetDiff:
    """What is still to be done, and what the actions so far leave of each device."""

    # Beside weights, engines and KV floors.
    free_bytes: dict[str, int]
    # Of what is free at this moment.
    now_bytes: dict[str, int]
    engines: Counter[str]
    # Model -> places that the target has and the cluster lacks.
    missing: dict[str, list[tuple[Devices, Hosted]]] = field(default_factory=dict)
    # Model -> copies where the target has none.
    surplus: dict[str, list[ModelView]] = field(default_factory=dict)
    # Model -> copies that are, or will be, where the target has them.
    staying: dict[str, list[ModelView]] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)

    def fits(self, model: ModelView, devices: Devices) -> bool:
        need = part_bytes(model, len(devices))
        return all(self.free_bytes[d] >= need and self.engines[d] > 0 for d in devices)

    def free_now(self, model: ModelView, devices: Devices) -> bool:
        """Memory that need not be waited for."""
        need = part_bytes(model, len(devices))
        return all(self.now_bytes[d] >= need for d in devices)

    def take(self, model: ModelView, devices: Devices) -> None:
        need = part_bytes(model, len(devices))
        for device in devices:
            self.free_bytes[device] -= need
            self.now_bytes[device] -= need
            self.engines[device] -= 1


def part_bytes(model: ModelView, tp: int) -> int:
    """Weights, engine and KV floor on each of `tp` devices."""
    divided = model.weight_bytes - model.share_bytes * model.tp + model.kv_floor_bytes
    return -(-divided // tp) + model.share_bytes


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Activate what the target has and the cluster lacks; move or evict what stands elsewhere.

    A move is make-before-break where the new home has room now, or gets it from the requests of
    models that stay there. If only moves are left and none can begin, one model is evicted first:
    two full devices that swap models need that, and so do models that wait for each other to leave.
    Models that the target leaves out are refused with its reason. `settings` has nothing for this.
    """
    if view.target is None:
        return tuple(Refuse(m.name, "no placement was searched") for m in _asked(view))
    draft = _draft(view, view.target)
    by_name = {m.name: m for m in view.models}
    _drop_surplus(draft)
    _move(draft)
    _activate(draft, by_name)
    moving = any(m.state in ("draining", "migrating") for m in view.models)
    if not draft.actions and not moving:
        _break_a_cycle(draft)
    draft.actions.extend(_refusals(view, view.target))
    return tuple(draft.actions)


def _asked(view: ClusterView) -> list[ModelView]:
    return sorted(asked_for(view), key=lambda m: m.name)


def _draft(view: ClusterView, target: Placement) -> TargetDiff:
    held = Counter[str]()
    for model in view.models:
        for device in devices_of(model):
            held[device] += part_bytes(model, model.tp)
    free = {g.name: g.capacity_bytes - g.fixed_bytes - held[g.name] for g in view.gpus}
    engines = Counter({g.name: g.engines_free if g.alive else 0 for g in view.gpus})
    draft = TargetDiff(free, {g.name: g.free_bytes for g in view.gpus}, engines)
    names = sorted({m.name for m in view.models})
    for name in names:
        _compare(draft, name, [m for m in view.models if m.name == name], target)
    return draft


def _compare(draft: TargetDiff, name: str, views: list[ModelView], target: Placement) -> None:
    """What `name` has too little and too much; a copy on its way counts where it will be, and what
    it leaves is no place for another until it has gone. One that leaves for nothing counts for the
    place that it still takes."""
    wanted = {
        unit.devices: host for unit in target.units for host in unit.models if host.model == name
    }
    here = {m.moving_to or devices_of(m): m for m in views if m.device}
    left = {devices_of(m)[0] for m in views if m.moving_to}
    known = {d: h for d, h in wanted.items() if set(d) <= set(draft.free_bytes)}
    missing = {d: h for d, h in known.items() if d not in here and d[0] not in left}
    draft.missing[name] = sorted(missing.items())
    stays = ((d, m) for d, m in sorted(here.items()) if m.state != "draining")
    draft.surplus[name] = []
    draft.staying[name] = []
    for devices, model in stays:
        (draft.staying if devices in wanted else draft.surplus)[name].append(model)


def _drop_surplus(draft: TargetDiff) -> None:
    """Replicas beyond the target's number go, but for the last one that serves while those that the
    target has are still on their way."""
    for name, extra in draft.surplus.items():
        spare = len(extra) - len(draft.missing[name])
        active = [m for m in extra if m.state == "active"]
        leaving = active[: max(0, spare)]
        serve = any(m.state in ("active", "migrating") for m in draft.staying[name])
        if draft.staying[name] and not serve and len(leaving) == len(active):
            leaving = leaving[1:]
        goes_on = serve or len(leaving) < len(active)
        for model in leaving:
            _evict(draft, model, "the placement has no place for it here", goes_on)


def _evict(draft: TargetDiff, model: ModelView, reason: str, move_running: bool) -> None:
    """SeaLLM §5: it "migrates ongoing requests after the ongoing iteration"."""
    draft.actions.append(Evict(model.name, devices_of(model)[0], reason, move_running))
    draft.surplus[model.name].remove(model)


def _move(draft: TargetDiff) -> None:
    for name, extra in draft.surplus.items():
        for model in [m for m in extra if m.state == "active"]:
            home = _first_fitting(draft, model, draft.missing[name])
            if home is None:
                continue
            draft.missing[name].remove(home)
            draft.surplus[name].remove(model)
            draft.take(model, home[0])
            source = devices_of(model)[0]
            reason = "the new placement"
            move = Migrate(name, source, home[0][0], reason, home[0][1:], move_running=True)
            draft.actions.append(move)


def _first_fitting(
    draft: TargetDiff, model: ModelView, homes: Iterable[tuple[Devices, Hosted]]
) -> tuple[Devices, Hosted] | None:
    """A copy does not move to another degree on its own first device, whose queue is the one's that
    it would take over from: it leaves first. Nor does it wait for room that another one holds which
    has to leave as well, and may wait for it in turn."""
    first = devices_of(model)[0]
    others = (m for extra in draft.surplus.values() for m in extra if m is not model)
    left = {device for other in others for device in devices_of(other)}

    def may_begin(devices: Devices) -> bool:
        if devices[0] == first or not draft.fits(model, devices):
            return False
        return left.isdisjoint(devices) or draft.free_now(model, devices)

    return next((home for home in homes if may_begin(home[0])), None)


def _activate(draft: TargetDiff, by_name: Mapping[str, ModelView]) -> None:
    for name, homes in draft.missing.items():
        model = by_name[name]
        # What stands elsewhere moves here as soon as there is room for it.
        for devices, host in homes[len(draft.surplus[name]) :]:
            if draft.fits(model, devices) and not set(devices) & set(model.barred):
                draft.take(model, devices)
                reason = f"the placement, with {size_text(draft.free_bytes[devices[0]])} left"
                activate = Activate(name, devices[0], reason, host.kv_limit_bytes, devices[1:])
                draft.actions.append(activate)


def _break_a_cycle(draft: TargetDiff) -> None:
    """The one with fewest requests goes; one whose other copies are not up yet last."""
    waiting = (extra for name, extra in draft.surplus.items() if draft.missing[name])
    stuck = [m for extra in waiting for m in extra if m.state == "active"]

    def cost(model: ModelView) -> tuple[bool, int, str]:
        coming = any(m.state == "activating" for m in draft.staying[model.name])
        return coming, model.running + model.waiting, model.name

    if stuck:
        reason = "the placement moves it, and its new home has no room yet"
        _evict(draft, min(stuck, key=cost), reason, move_running=True)


def _refusals(view: ClusterView, target: Placement) -> list[Action]:
    placed = {host.model for unit in target.units for host in unit.models}
    lost = [m for m in _asked(view) if m.name not in placed]
    return [Refuse(m.name, target.refused.get(m.name, "the placement leaves it out")) for m in lost]
