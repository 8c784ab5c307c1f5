"""Plans that bring the cluster to a searched placement (`ClusterView.target`) and keep it there.

No model is evicted for load; it leaves a device only if the target moves it. Used by muxserve,
muxserve++, alpaserve and seallm (SeaLLM §5: services move once their new devices are ready, and old
engines stop then).
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
    """Differences between cluster and target, and each device's resources after `actions`."""

    # Device -> memory left after weights, engines and KV floors.
    free_bytes: dict[str, int]
    # Device -> memory that is free at this moment.
    now_bytes: dict[str, int]
    # Device -> number of free engines.
    engines: Counter[str]
    # Model -> units of the target without a copy in the cluster.
    missing: dict[str, list[tuple[Devices, Hosted]]] = field(default_factory=dict)
    # Model -> copies on devices that are not in the target.
    surplus: dict[str, list[ModelView]] = field(default_factory=dict)
    # Model -> copies that are on, or move to, devices in the target.
    staying: dict[str, list[ModelView]] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)

    def fits(self, model: ModelView, devices: Devices) -> bool:
        need = part_bytes(model, len(devices))
        return all(self.free_bytes[d] >= need and self.engines[d] > 0 for d in devices)

    def free_now(self, model: ModelView, devices: Devices) -> bool:
        """Returns True if the memory is free now, without waiting for evictions."""
        need = part_bytes(model, len(devices))
        return all(self.now_bytes[d] >= need for d in devices)

    def take(self, model: ModelView, devices: Devices) -> None:
        need = part_bytes(model, len(devices))
        for device in devices:
            self.free_bytes[device] -= need
            self.now_bytes[device] -= need
            self.engines[device] -= 1


def part_bytes(model: ModelView, tp: int) -> int:
    """Returns the size of weights, engine and KV floor on each of `tp` devices."""
    divided = model.weight_bytes - model.share_bytes * model.tp + model.kv_floor_bytes
    return -(-divided // tp) + model.share_bytes


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Activates missing copies of the target, and moves or evicts surplus copies.

    A migration starts if its target has room now, or gets it when requests of staying models end.
    If only migrations are left and none can start, one model is evicted first. Two full devices
    that swap models need this, as do models that wait for each other's memory. Models that are not
    in the target are refused with its reason. `settings` is not used.
    """
    if view.target is None:
        return tuple(Refuse(m.name, "no placement was searched") for m in asked_for(view))
    draft = _draft(view, view.target)
    by_name = {m.name: m for m in view.models}
    _drop_surplus(draft)
    _move(draft)
    _activate(draft, by_name)
    moving = any(m.state in ("draining", "migrating") for m in view.models)
    if not draft.actions and not moving:
        _break_cycle(draft)
    draft.actions.extend(_refusals(view, view.target))
    return tuple(draft.actions)


def _draft(view: ClusterView, target: Placement) -> TargetDiff:
    held = Counter[str]()
    for model in view.models:
        for device in devices_of(model):
            held[device] += part_bytes(model, model.tp)
    free = {g.name: g.capacity_bytes - g.fixed_bytes - held[g.name] for g in view.gpus}
    engines = Counter({g.name: g.engines_free if g.alive else 0 for g in view.gpus})
    draft = TargetDiff(free, {g.name: g.free_bytes for g in view.gpus}, engines)
    for name in dict.fromkeys(m.name for m in view.models):
        _compare(draft, name, [m for m in view.models if m.name == name], target)
    return draft


def _compare(draft: TargetDiff, name: str, views: list[ModelView], target: Placement) -> None:
    """Sets the missing, surplus and staying copies of `name`.

    A migrating copy counts at its target. Its source is not available to another copy until it has
    left. A draining copy counts for the devices that it still holds.
    """
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
    """Evicts surplus copies beyond the number of missing ones.

    Keeps one that serves until a copy in the target serves.
    """
    for name, extra in draft.surplus.items():
        spare = len(extra) - len(draft.missing[name])
        active = [m for m in extra if m.state == "active"]
        leaving = active[: max(0, spare)]
        serve = any(m.state in ("active", "migrating") for m in draft.staying[name])
        if draft.staying[name] and not serve and len(leaving) == len(active):
            leaving = leaving[1:]
        others_serve = serve or len(leaving) < len(active)
        for model in leaving:
            _evict(draft, model, "the placement does not have it here", others_serve)


def _evict(draft: TargetDiff, model: ModelView, reason: str, move_running: bool) -> None:
    """Evicts a surplus copy. SeaLLM §5 "migrates ongoing requests after the ongoing iteration"."""
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
    """Returns the first unit that a copy can move to, or None.

    A copy is not moved to another degree on the same first device, since both would share the
    device's queue. A copy does not wait for memory of another surplus copy, which could wait for
    it in turn.
    """
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
        known = (*draft.staying[name], *draft.surplus[name])
        joins = any(copy.state in ("active", "migrating") for copy in known)
        # The first ones are left to surplus copies, which move here as soon as they fit.
        for devices, host in homes[len(draft.surplus[name]) :]:
            if draft.fits(model, devices) and not set(devices) & set(model.barred):
                draft.take(model, devices)
                reason = f"the placement, with {size_text(draft.free_bytes[devices[0]])} left"
                limit_bytes, peers = host.kv_limit_bytes, devices[1:]
                activate = Activate(name, devices[0], reason, limit_bytes, peers, joins)
                draft.actions.append(activate)


def _break_cycle(draft: TargetDiff) -> None:
    """Evicts the copy with the fewest requests, if possible of a model with no copy activating."""
    waiting = (extra for name, extra in draft.surplus.items() if draft.missing[name])
    stuck = [m for extra in waiting for m in extra if m.state == "active"]

    def cost(model: ModelView) -> tuple[bool, int]:
        coming = any(m.state == "activating" for m in draft.staying[model.name])
        return coming, model.running + model.waiting

    if stuck:
        reason = "the placement moves it, and its new devices do not have room yet"
        _evict(draft, min(stuck, key=cost), reason, move_running=True)


def _refusals(view: ClusterView, target: Placement) -> list[Action]:
    placed = {host.model for unit in target.units for host in unit.models}
    lost = [m for m in asked_for(view) if m.name not in placed]
    why = "it is not in the placement"
    return [Refuse(m.name, target.refused.get(m.name, why)) for m in lost]
