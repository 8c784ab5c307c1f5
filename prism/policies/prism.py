"""The paper's cluster policy (Prism §6.2): placement by KV pressure ratio, activation on arrival,
eviction of idle models when memory is short, migration when it relieves pressure enough.

Pure: the same view and settings give the same actions. Within a plan, an `Evict` stands before
the `Activate` that needs its room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from prism.policies import drain, kvpr, replicas
from prism.policies.balance import (
    elsewhere,
    migrate,
    movable,
    rebalance,
)
from prism.policies.bins import (
    Bin,
    current_bins,
    devices_of,
    need_bytes,
    part,
    shortfall,
    size_text,
)
from prism.policies.builder import PlanBuilder, settled, short
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    DeviceLoad,
    Evict,
    ModelView,
    Refuse,
    Settings,
    beside,
)


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """What to do now. Never evicts a model that is `never_evict`, running or waiting, and plans
    nothing for a model whose last action is still under way."""
    absent = [m for m in view.models if m.device is None and m.state == "absent"]
    asked = [m for m in absent if m.waiting > 0 or m.never_evict]
    wanted = [m for m in absent if m.wanted and not (m.waiting > 0 or m.never_evict)]
    relieve = view.rebalance and not calm(_loads(view, settings), settings)
    crowded = any(replicas.saturated(m, settings) for m in replicas.queued(view))
    leaving = drain.must_leave(view)
    if not (asked or wanted or relieve or crowded or leaving):
        return ()
    models, gpus = settled(view)
    builder = PlanBuilder(view, settings, current_bins(models, gpus))
    _seat(builder, asked, _make_room)
    _seat(builder, wanted, _refuse)
    drain.vacate(builder, leaving, _clear_for, _evict)
    if relieve:
        _free_short_devices(builder)
    if relieve or crowded:
        replicas.adjust(builder, _clear_idle)
    if relieve:
        rebalance(builder)
    return tuple(builder.actions)


def calm(loads: Iterable[DeviceLoad], settings: Settings) -> bool:
    """No device is short of memory or contended: all are left as they are."""
    # A hair below, since parts are summed in another order than `rebalance` does.
    most, least = settings.contended_requests * 0.999, settings.short_fraction
    return not any(load.copies or load.beside >= most or load.free_part < least for load in loads)


def _loads(view: ClusterView, settings: Settings) -> list[DeviceLoad]:
    parts: dict[str, list[float]] = {gpu.name: [] for gpu in view.gpus}
    copies = Counter(model.name for model in view.models)
    unsettled: set[str] = set()
    for model in view.models:
        if replicas.to_adjust(model, copies[model.name], settings):
            unsettled.update(devices_of(model))
        if model.device is not None and model.token_rate > 0:
            part = model.token_rate * model.slo_tpot_s / model.tp
            for device in (model.device, *model.peers):
                if device in parts:
                    parts[device].append(part)
    return [
        DeviceLoad(
            beside(parts[gpu.name]),
            gpu.free_bytes / max(1, gpu.capacity_bytes),
            gpu.name in unsettled,
        )
        for gpu in view.gpus
    ]


# --- absent models -------------------------------------------------------------------------


def _seat(builder: PlanBuilder, seekers: list[ModelView], otherwise: Callable[..., None]) -> None:
    """Algorithm 1 over the seekers, the residents staying where they are; `otherwise` deals with
    those that have no room."""
    if not seekers:
        return
    tau = builder.settings.migration_threshold
    placement = kvpr.place(seekers, builder.view.gpus, tau, builder.copied_bins)
    parts = sorted(map(part, seekers), key=kvpr.by_pressure)
    for model in parts:
        if model.name in placement.homes:
            _activate(builder, model, [builder.bins[d] for d in placement.homes[model.name]])
    for model in parts:
        if model.name not in placement.homes:
            otherwise(builder, model)


def _activate(builder: PlanBuilder, model: ModelView, home: Sequence[Bin], note: str = "") -> None:
    """`model`: a part, as everywhere below; `home`: a bin for each, rank 0 first."""
    why = "requests wait" if model.waiting else "never_evict" if model.never_evict else "wanted"
    first, *peers = home
    pressure = f"KVPR {first.kvpr:.3g}, {size_text(first.room_bytes)} left"
    reason = f"{why}; {note or 'least pressed device with room'} ({pressure})"
    ranks = tuple(b.name for b in peers)
    builder.actions.append(Activate(model.name, first.name, reason, peers=ranks))
    for b in home:
        b.put(model)


def _refuse(builder: PlanBuilder, model: ModelView) -> None:
    builder.actions.append(Refuse(model.name, shortfall(model, builder.bins)))


def _make_room(builder: PlanBuilder, model: ModelView) -> None:
    """Evict idle models, else move one model away, else evict younger idle ones, else refuse.

    Models idle for less than the threshold go only when requests would starve otherwise.
    """
    home = kvpr.homes(model, builder.bins, kvpr.by_rank, 0.0)
    if home is not None:  # what was evicted for another model is enough for this one as well
        return _activate(builder, model, home)
    if _evict_for(builder, model, _over_threshold(builder), "idle over the threshold"):
        return
    if _evict_for(builder, model, replicas.beyond_first(builder), "other copies serve it"):
        return
    if _is_made_room_for(builder, model):
        return _refuse(builder, model)
    if _move_for(builder, model):
        return
    if not (
        model.waiting > 0 and _evict_for(builder, model, _longest_idle(builder), "requests starve")
    ):
        _refuse(builder, model)


def _is_made_room_for(builder: PlanBuilder, model: ModelView) -> bool:
    """A model is moving away from a device where `model` then has room."""
    for mover in builder.view.models:
        for b in (builder.bins.get(device) for device in devices_of(mover)):
            if mover.state == "migrating" and b is not None and _victims(b, model, [mover]):
                return True
    return False


# --- eviction ------------------------------------------------------------------------------


def _idle(builder: PlanBuilder, longer_than_s: float) -> list[ModelView]:
    """A model that is brought up stays for as long as that took: under overload, models that take
    turns spend no more time coming than being there."""
    found = {
        (model.name, model.device): model
        for b in builder.bins.values()
        for model in b.models.values()
        if model.state == "active"
        and not (model.never_evict or model.running or model.waiting)
        and model.idle_s > longer_than_s
        and model.owes_s <= 0
        and not builder.is_changing(model.name)
    }
    return list(found.values())


def _over_threshold(builder: PlanBuilder) -> list[ModelView]:
    """Idle models in the paper's order: larger SLO first."""
    idle = _idle(builder, builder.settings.idle_threshold_s)
    return sorted(idle, key=lambda m: (-m.slo_ttft_s, -m.slo_tpot_s, -m.idle_s, m.name))


def _longest_idle(builder: PlanBuilder) -> list[ModelView]:
    idle = _idle(builder, builder.settings.min_idle_s)
    return sorted(idle, key=lambda m: (-m.idle_s, -m.slo_ttft_s, m.name))


def _victims(b: Bin, model: ModelView, idle: Iterable[ModelView]) -> list[ModelView] | None:
    """The fewest models of `idle`, in its order, without which `model` fits on `b`."""
    if b.fits(model):
        return []
    if not b.allows(model):
        return None
    trial = b.copy()
    chosen: list[ModelView] = []
    for victim in filter(b.holds, idle):
        trial.take(victim.name)
        chosen.append(victim)
        if trial.fits(model):
            return _spared(trial, model, chosen)
    return None


def _spared(trial: Bin, model: ModelView, chosen: list[ModelView]) -> list[ModelView]:
    """`chosen` without those that the later ones made unnecessary."""
    kept = list(chosen)
    for victim in reversed(chosen[:-1]):
        trial.put(victim)
        if trial.fits(model):
            kept.remove(victim)
        else:
            trial.take(victim.name)
    return kept


Option = tuple[tuple[int, float, str], list[Bin], list[ModelView]]
"""(rank, a bin for each part, who leaves them)"""


def _evict_for(builder: PlanBuilder, model: ModelView, idle: Sequence[ModelView], why: str) -> bool:
    """Evict where that costs the fewest models, then where pressure is least afterwards."""
    option = _cheapest(builder.bins.values(), model, idle)
    if option is None:
        return False
    _, home, victims = option
    _clear(builder, model, victims, why)
    _activate(builder, model, home, f"after evicting {', '.join(v.name for v in victims)}")
    return True


def _clear_for(builder: PlanBuilder, model: ModelView) -> bool:
    """Room for a model that has to move: it does so when they have gone. False: there is none."""
    for idle in (_over_threshold(builder), _longest_idle(builder)):
        if (option := _cheapest(builder.bins.values(), model, idle)) is not None:
            _clear(builder, model, option[2], "its device is needed")
            return True
    return False


def _clear_idle(
    builder: PlanBuilder, model: ModelView, bins: Collection[Bin], worst: float
) -> Sequence[Bin] | None:
    """Room for another copy, of what is idle over the threshold there; with it each device's KVPR
    is below `worst`."""
    option = _cheapest(bins, model, _over_threshold(builder))
    if option is None:
        return None
    _, home, victims = option
    for b in home:
        trial = b.copy()
        for victim in victims:
            if victim.name in trial.models:
                trial.take(victim.name)
        if trial.kvpr_with(model) >= worst:
            return None
    _clear(builder, model, victims, "idle over the threshold")
    return home


def _cheapest(bins: Iterable[Bin], model: ModelView, idle: Sequence[ModelView]) -> Option | None:
    options = []
    for b in bins:
        victims = _victims(b, model, idle)
        if victims is not None:
            rank = (len(victims), b.kvpr_without(v.name for v in victims), b.name)
            options.append((rank, [b], victims))
    if model.tp > 1:
        options = _on_one_node(options, model.tp)
    return min(options, key=lambda option: option[0], default=None)


def _clear(builder: PlanBuilder, model: ModelView, victims: Iterable[ModelView], why: str) -> None:
    for victim in victims:
        reason = f"{why}: idle for {victim.idle_s:.1f} s, makes room for {model.name}"
        _evict(builder, victim, reason)


def _on_one_node(options: Iterable[Option], tp: int) -> list[Option]:
    """For each node that has enough of them, the cheapest `tp` devices together, of which no two
    lose a copy of the same model: a model has one action at a time."""
    nodes: dict[str, tuple[list[Option], dict[str, ModelView]]] = {}
    for option in sorted(options, key=lambda option: option[0]):
        chosen, victims = nodes.setdefault(option[1][0].gpu.node, ([], {}))
        if len(chosen) < tp and all(victims.get(v.name, v) == v for v in option[2]):
            chosen.append(option)
            victims.update({v.name: v for v in option[2]})
    found: list[Option] = []
    for chosen, victims in nodes.values():
        if len(chosen) == tp:
            worst = max(rank[1] for rank, _, _ in chosen)
            home = [b for _, bins, _ in chosen for b in bins]
            found.append(((len(victims), worst, home[0].name), home, list(victims.values())))
    return found


def _evict(builder: PlanBuilder, victim: ModelView, reason: str) -> None:
    """All parts leave; `victim` is active, so that it has a device."""
    assert victim.device is not None
    # What begins to run before the copy leaves goes on at the others, too.
    others = victim.name in builder.copies
    builder.actions.append(Evict(victim.name, victim.device, reason, move_running=others))
    for b in filter(None, map(builder.bins.get, devices_of(victim))):
        if b.holds(victim):
            b.take(victim.name)


def _free_short_devices(builder: PlanBuilder) -> None:
    """A device short of memory loses its first idle model, unless models come or go there."""
    scarce = [b for b in builder.bins.values() if short(b, builder.settings)]
    if not scarce:
        return
    changing, idle = builder.changing(), _over_threshold(builder)
    for b in scarce:
        here = filter(b.holds, idle)
        victim = next((m for m in here if not builder.is_changing(m.name)), None)
        if victim is None or b.name in changing:
            continue
        free = size_text(b.gpu.free_bytes)
        _evict(builder, victim, f"idle for {victim.idle_s:.1f} s while {free} are free")
        changing.update(devices_of(victim))


# --- migration -----------------------------------------------------------------------------


def _move_for(builder: PlanBuilder, model: ModelView) -> bool:
    """Repack: one resident moves to another device so that all parts of `model` have room.

    On each device idle residents first, then smaller ones. Make-before-break, so the room on the
    target must be there already. `model` itself is activated by a later plan, when the room is
    there. A move that is not enough is not made: the next plan would see the same, and might take
    it back.
    """
    roomy: dict[str, list[str]] = {}
    for b in builder.bins.values():
        if b.fits(model):
            roomy.setdefault(b.gpu.node, []).append(b.name)
    most_bytes = max((b.room_bytes for b in builder.bins.values()), default=0)
    several = builder.copies
    for b in builder.bins.values():
        beside = roomy.get(b.gpu.node, [])
        alone = [m for m in movable(b) if m.name not in several]
        for mover in sorted(alone, key=lambda m: (m.running > 0, need_bytes(m), m.name)):
            enough = len(beside) + len(devices_of(mover)) >= model.tp
            if not enough or need_bytes(mover) > most_bytes:
                continue
            if _victims(b, model, [mover]) is None:
                continue
            if (home := _other_home(builder, model, mover, beside)) is not None:
                migrate(builder, mover, home, f"makes room for {model.name}")
                return True
    return False


def _other_home(
    builder: PlanBuilder, model: ModelView, mover: ModelView, roomy: Sequence[str]
) -> tuple[Bin, ...] | None:
    """Where `mover` is not in the way of `model`: on none of `roomy`, which have room for a part of
    it already, if possible."""
    for avoided in (roomy, ()) if roomy else ((),):
        home = elsewhere(builder, mover, avoided)
        if home is not None and _fits_after(builder, model, mover, home):
            return home
    return None


def _fits_after(
    builder: PlanBuilder, model: ModelView, mover: ModelView, home: Sequence[Bin]
) -> bool:
    """Whether all parts of `model` have room once `mover` has moved to `home`."""
    held = [device for device in devices_of(mover) if device in builder.bins]
    changed = {*held, *(b.name for b in home)}
    bins = builder.bins | {name: builder.bins[name].copy() for name in changed}
    for device in held:
        bins[device].take(mover.name)
    for b in home:
        bins[b.name].put(mover)
    return kvpr.homes(model, bins, kvpr.by_rank, 0.0) is not None
