"""Cluster policy of the Prism paper (§6.2).

Models are placed by KV pressure ratio and activated on arrival. Idle models are evicted when memory
is short, and models migrate when that relieves enough pressure. Pure: the same view and settings
give the same actions. In a plan, an `Evict` precedes the `Activate` that needs its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from prism.policies import kvpr
from prism.policies.admission import moore_hodgson
from prism.policies.bins import (
    Bin,
    Bins,
    current_bins,
    devices_of,
    need_bytes,
    part,
    shortfall,
    size_text,
)
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    DeviceLoad,
    Evict,
    ModelView,
    Refuse,
    Settings,
    contending,
)
from prism.policies.planning import compute, degrees, evacuation, model_copies, overload
from prism.policies.planning.balance import (
    find_target,
    migrate,
    movable,
    rebalance,
)
from prism.policies.planning.builder import PlanBuilder, is_short, settled
from prism.policies.planning.next_plan import next_plan_in_s
from prism.policies.policy import ADMISSION_ORDER, ELASTIC_MEMORY, Policy

COPY_COSTS = 4.0
"""Requests that must wait for a copy, for each that is expected for the models that it evicts."""


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Returns the actions to start now.

    Never evicts a model that is `never_evict`, nor one with requests unless another copy serves it
    or it is given up for overload. Plans nothing for a model with an action in progress.
    """
    absent = [m for m in view.models if m.device is None and m.state == "absent"]
    asked = [m for m in absent if m.waiting > 0 or m.never_evict]
    wanted = [m for m in absent if m.wanted and not (m.waiting > 0 or m.never_evict)]
    deferred = [m for m in absent if m.deferred and view.rebalance and m.waiting == 0]
    refusable = any(
        m.traffic.requests and (m.deferred or m.state == "draining") for m in view.models
    )
    relieve = view.rebalance and not is_balanced(_loads(view, settings), settings)
    changes = compute.changes(view) if view.rebalance else []
    saturated = any(model_copies.saturated(m, settings) for m in model_copies.queued(view))
    leaving = evacuation.must_leave(view)
    if not (asked or wanted or deferred or refusable or relieve or changes or saturated or leaving):
        return ()
    models, gpus = settled(view)
    builder = PlanBuilder(view, settings, current_bins(models, gpus))
    if asked or refusable:
        builder.given_up = overload.given_up(builder)
    asked, wanted, deferred = (
        [m for m in some if m.name not in builder.given_up] for some in (asked, wanted, deferred)
    )
    _place_absent(builder, asked, builder.copied_bins, _make_room)
    _give_up(builder)
    _place_absent(builder, wanted, builder.copied_bins, _refuse)
    _place_absent(builder, deferred, builder.spare_bins, lambda *_: None)
    evacuation.vacate(builder, leaving, _make_room_to_move, _evict)
    if relieve:
        _free_short_devices(builder)
    compute.relieve(builder, changes, _make_room_for_degree)
    if relieve or saturated:
        model_copies.adjust(builder, _make_room_for_copy)
    if relieve:
        rebalance(builder)
    return tuple(builder.actions)


def is_balanced(loads: Iterable[DeviceLoad], settings: Settings) -> bool:
    """Returns True if no device is short of memory or contended, so that none needs a change."""
    # Slightly lower than the setting, since `rebalance` sums parts in another order.
    most, least = settings.contended_requests * 0.999, settings.short_fraction
    return not any(
        load.unsettled or load.contending >= most or load.free_part < least for load in loads
    )


def _loads(view: ClusterView, settings: Settings) -> list[DeviceLoad]:
    parts: dict[str, list[float]] = {gpu.name: [] for gpu in view.gpus}
    copies = Counter(model.name for model in view.models)
    unsettled: set[str] = set()
    for model in view.models:
        if model_copies.may_adjust(model, copies[model.name], settings):
            unsettled.update(devices_of(model))
        if model.device is not None and model.token_rate > 0:
            part = model.token_rate * model.slo_tpot_s / model.tp
            for device in (model.device, *model.peers):
                if device in parts:
                    parts[device].append(part)
    return [
        DeviceLoad(
            contending(parts[gpu.name]),
            gpu.free_bytes / max(1, gpu.capacity_bytes),
            gpu.name in unsettled,
        )
        for gpu in view.gpus
    ]


# --- absent models -------------------------------------------------------------------------


def _place_absent(
    builder: PlanBuilder,
    absent: list[ModelView],
    bins: Callable[[], Bins],
    otherwise: Callable[..., None],
) -> None:
    """Runs Algorithm 1 on absent models, without moving residents.

    Each model has the degree that its traffic needs, or else its least one. Calls `otherwise` for
    each model that does not fit into `bins`.
    """
    if not absent:
        return
    tau = builder.settings.migration_threshold
    chosen = [degrees.to_activate(m) for m in absent]
    placement = kvpr.place(chosen, builder.view.gpus, tau, bins)
    for model in sorted(map(part, chosen), key=kvpr.by_pressure):
        if model.name in placement.devices:
            _activate(builder, model, [builder.bins[d] for d in placement.devices[model.name]])
    for model in sorted(map(part, absent), key=kvpr.by_pressure):
        if model.name not in placement.devices:
            otherwise(builder, model)


def _activate(builder: PlanBuilder, model: ModelView, home: Sequence[Bin], note: str = "") -> None:
    """Adds an activation to the plan.

    Here and below `model` is a part, and `home` has one bin per rank, rank 0 first.
    """
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


def _give_up(builder: PlanBuilder) -> None:
    """Refuses the models that are given up, until a device has memory to spare for them."""
    for model in builder.view.models:
        if model.name not in builder.given_up or builder.is_changing(model.name):
            continue
        absent = model.device is None and not _fill_spare(builder, part(model))
        if absent or (model.state == "draining" and model.name not in builder.copies):
            _reject(builder, part(model))


def _fill_spare(builder: PlanBuilder, model: ModelView) -> bool:
    """Activates a model that gets requests in spare memory, or that of models idle for long."""
    if not builder.view.rebalance or not (model.waiting or model.traffic.rate_rps):
        return False
    home = kvpr.choose_devices(model, builder.spare_bins())
    if home is not None:
        _activate(builder, model, [builder.bins[b.name] for b in home])
        return True
    full = [b for b in builder.bins.values() if not b.fits(model)]
    option = _cheapest(full, model, _over_threshold(builder))
    return _replace(builder, model, option, "idle over the threshold")


def _reject(builder: PlanBuilder, model: ModelView) -> None:
    size = size_text(need_bytes(model) * model.tp)
    reason = f"overload: it has fewer requests for its {size} than the models that are served"
    builder.actions.append(Refuse(model.name, reason, overload=True))


def _make_room(builder: PlanBuilder, model: ModelView) -> None:
    """Evicts idle models, else moves one model, else evicts ones that are worth less, else refuses.

    Models idle for less than the threshold are evicted only if requests would starve otherwise, and
    fewer requests are expected for them than for `model`. Models that are given up are evicted
    although they have requests.
    """
    home = kvpr.choose_devices(model, builder.bins)
    if home is not None:  # evictions for another model are enough for this one, too
        return _activate(builder, model, home)
    if _evict_for(builder, model, _over_threshold(builder), "idle over the threshold"):
        return
    if _evict_for(builder, model, model_copies.surplus_copies(builder), "other copies serve it"):
        return
    if _is_room_coming(builder, model):
        return _refuse(builder, model)
    if _move_for(builder, model):
        return
    if model.traffic.requests and _evict_for(
        builder, model, overload.residents(builder, builder.given_up), "overload"
    ):
        return
    worth = overload.expected_requests(model, builder.settings)
    option = _lesser(builder, builder.bins.values(), model, worth) if model.waiting else None
    if not _replace(builder, model, option, "requests starve"):
        _refuse(builder, model)


def _is_room_coming(builder: PlanBuilder, model: ModelView) -> bool:
    """Returns True if `model` will fit on a device once a current migration is done."""
    for mover in builder.view.models:
        for b in (builder.bins.get(device) for device in devices_of(mover)):
            if mover.state == "migrating" and b is not None and _victims(b, model, [mover]):
                return True
    return False


# --- eviction ------------------------------------------------------------------------------


def _idle(builder: PlanBuilder, longer_than_s: float) -> list[ModelView]:
    """Returns evictable models that have been idle for more than `longer_than_s`.

    Excludes models that have been active for less time than their load took. Under overload, models
    that alternate on a device then spend at most half of the time loading.
    """
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
    """Returns models idle over the threshold in the paper's order: larger SLO first."""
    idle = _idle(builder, builder.settings.idle_threshold_s)
    return sorted(idle, key=lambda m: (-m.slo_ttft_s, -m.slo_tpot_s, -m.idle_s))


def _longest_idle(builder: PlanBuilder) -> list[ModelView]:
    idle = _idle(builder, builder.settings.min_idle_s)
    return sorted(idle, key=lambda m: (-m.idle_s, -m.slo_ttft_s))


def _victims(b: Bin, model: ModelView, idle: Iterable[ModelView]) -> list[ModelView] | None:
    """Returns the models of `idle` to evict so that `model` fits on `b`; None if not possible."""
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
            return _necessary(trial, model, chosen)
    return None


def _necessary(trial: Bin, model: ModelView, chosen: list[ModelView]) -> list[ModelView]:
    """Returns `chosen` without models that later ones made unnecessary to evict."""
    kept = list(chosen)
    for victim in reversed(chosen[:-1]):
        trial.put(victim)
        if trial.fits(model):
            kept.remove(victim)
        else:
            trial.take(victim.name)
    return kept


Option = tuple[tuple[int, float, str], list[Bin], list[ModelView]]
"""(rank, a bin for each part, models to evict)"""


def _evict_for(builder: PlanBuilder, model: ModelView, idle: Sequence[ModelView], why: str) -> bool:
    """Evicts where the fewest models are evicted, then where KVPR is least afterwards."""
    return _replace(builder, model, _cheapest(builder.bins.values(), model, idle), why)


def _replace(builder: PlanBuilder, model: ModelView, option: Option | None, why: str) -> bool:
    """Evicts the option's models for `model`. Returns False without an option."""
    if option is None:
        return False
    _, home, victims = option
    _evict_all(builder, model, victims, why)
    _activate(builder, model, home, f"after evicting {', '.join(v.name for v in victims)}")
    return True


def _make_room_to_move(builder: PlanBuilder, model: ModelView) -> bool:
    """Evicts idle models for one that must leave its device. Returns False if that is impossible.

    A later plan moves the model, once the evictions are done.
    """
    for idle in (_over_threshold(builder), _longest_idle(builder)):
        if (option := _cheapest(builder.bins.values(), model, idle)) is not None:
            _evict_all(builder, model, option[2], "its device is needed")
            return True
    return False


def _make_room_for_degree(builder: PlanBuilder, model: ModelView, bins: Collection[Bin]) -> bool:
    """Evicts models idle over the threshold so that all parts of `model` fit into `bins`.

    Returns False if that is impossible, or if only KV memory of running requests is in the way.
    """
    option = _cheapest(bins, model, _over_threshold(builder))
    if option is None or not option[2]:
        return False
    _evict_all(builder, model, option[2], f"tp {model.tp} is needed")
    return True


def _make_room_for_copy(
    builder: PlanBuilder, model: ModelView, bins: Collection[Bin], worst: float
) -> Sequence[Bin] | None:
    """Evicts models idle over the threshold for another copy. Returns its bins, or None.

    Models idle for less are evicted if requests have waited for `model` for as long as the
    threshold, `COPY_COSTS` times those that are expected for them, which may evict the copy again.
    With the copy the KVPR of each of its devices must be below `worst`.
    """
    option = _cheapest(bins, model, _over_threshold(builder))
    if option is None and model.oldest_wait_s > builder.settings.idle_threshold_s:
        option = _lesser(builder, bins, model, model.waiting / COPY_COSTS)
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
    _evict_all(builder, model, victims, "another copy is needed")
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


def _lesser(
    builder: PlanBuilder, bins: Iterable[Bin], model: ModelView, most: float
) -> Option | None:
    """Returns the cheapest option to evict idle models, or None.

    At most `most` requests may be expected for them together. Those with the fewest for their size
    are tried first.
    """
    settings = builder.settings
    expected = partial(overload.expected_requests, settings=settings)
    idle = [m for m in _idle(builder, settings.min_idle_s) if expected(m) <= most]
    idle.sort(key=lambda m: (expected(m) / need_bytes(m), -m.idle_s))
    option = _cheapest(bins, model, idle)
    return option if option is not None and sum(map(expected, option[2])) <= most else None


def _evict_all(
    builder: PlanBuilder, model: ModelView, victims: Iterable[ModelView], why: str
) -> None:
    for victim in victims:
        idle = f"idle for {victim.idle_s:.1f} s, " if victim.idle_s else ""
        reason = f"{why}: {idle}makes room for {model.name}"
        _evict(builder, victim, reason)


def _on_one_node(options: Iterable[Option], tp: int) -> list[Option]:
    """Returns the cheapest combination of `tp` devices for each node with enough devices.

    No two devices of a combination evict different copies of one model, since a model has only one
    action at a time.
    """
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
    """Adds the eviction of all parts of a copy to the plan. REQUIRES: `victim` is active."""
    assert victim.device is not None
    # Requests that start before the eviction resume on the other copies.
    others = victim.name in builder.copies
    builder.actions.append(Evict(victim.name, victim.device, reason, move_running=others))
    for b in filter(None, map(builder.bins.get, devices_of(victim))):
        if b.holds(victim):
            b.take(victim.name)


def _free_short_devices(builder: PlanBuilder) -> None:
    """Evicts the first idle model of each device that lacks memory for another model.

    Skips devices that an action is changing.
    """
    short = [b for b in builder.bins.values() if is_short(b, builder.settings)]
    if not short:
        return
    changing, idle = builder.changing(), _over_threshold(builder)
    for b in short:
        here = list(filter(b.holds, idle))
        victim = next((m for m in here if not builder.is_changing(m.name)), None)
        if victim is None or b.name in changing or not _lacks_kv(b, here, builder.settings):
            continue
        free = size_text(b.gpu.free_bytes)
        _evict(builder, victim, f"idle for {victim.idle_s:.1f} s while {free} are free")
        changing.update(devices_of(victim))


def _lacks_kv(b: Bin, idle: Collection[ModelView], settings: Settings) -> bool:
    """Returns True if a model that is not `idle` wants more KV memory than is free.

    Its requests wait, or its tokens of one idle threshold, at its present rate, take more.
    """
    gone = {m.name for m in idle}
    busy = [m for m in b.models.values() if m.name not in gone]
    coming_bytes = sum(m.token_rate * m.token_bytes for m in busy) * settings.idle_threshold_s
    return any(m.waiting for m in busy) or coming_bytes > b.gpu.free_bytes


# --- migration -----------------------------------------------------------------------------


def _move_for(builder: PlanBuilder, model: ModelView) -> bool:
    """Moves one resident to another device, so that all parts of `model` fit afterwards.

    Idle residents are tried first, then smaller ones. The target must have free memory already
    (make before break). A later plan activates `model`. A move that is not sufficient is not made,
    since the next plan would see the same situation and might revert it.
    """
    roomy: dict[str, list[str]] = {}
    for b in builder.bins.values():
        if b.fits(model):
            roomy.setdefault(b.gpu.node, []).append(b.name)
    most_bytes = max((b.room_bytes for b in builder.bins.values()), default=0)
    several = builder.copies
    for b in builder.bins.values():
        same_node = roomy.get(b.gpu.node, [])
        alone = [m for m in movable(b) if m.name not in several]
        for mover in sorted(alone, key=lambda m: (m.running > 0, need_bytes(m))):
            enough = len(same_node) + len(devices_of(mover)) >= model.tp
            if not enough or need_bytes(mover) > most_bytes:
                continue
            if _victims(b, model, [mover]) is None:
                continue
            if (home := _target_of(builder, model, mover, same_node)) is not None:
                migrate(builder, mover, home, f"makes room for {model.name}")
                return True
    return False


def _target_of(
    builder: PlanBuilder, model: ModelView, mover: ModelView, roomy: Sequence[str]
) -> tuple[Bin, ...] | None:
    """Returns devices for `mover` so that `model` fits afterwards, or None.

    Avoids the devices `roomy`, which have room for a part of `model` already, if possible.
    """
    for avoided in (roomy, ()) if roomy else ((),):
        home = find_target(builder, mover, avoided)
        if home is not None and _fits_after(builder, model, mover, home):
            return home
    return None


def _fits_after(
    builder: PlanBuilder, model: ModelView, mover: ModelView, home: Sequence[Bin]
) -> bool:
    """Returns True if all parts of `model` fit after `mover` has moved to `home`."""
    held = [device for device in devices_of(mover) if device in builder.bins]
    changed = {*held, *(b.name for b in home)}
    bins = builder.bins | {name: builder.bins[name].copy() for name in changed}
    for device in held:
        bins[device].take(mover.name)
    for b in home:
        bins[b.name].put(mover)
    return kvpr.choose_devices(model, bins) is not None


POLICY = Policy(
    "prism",
    plan,
    frozenset({ADMISSION_ORDER, ELASTIC_MEMORY}),
    order=moore_hodgson.order,
    is_balanced=is_balanced,
    next_plan_in_s=next_plan_in_s,
    drains=True,
)
