"""Moves and degrees of the prism policy that relieve the compute of devices.

They are chosen by the requests that are late (`latency.py`), as those of `balance.py` are by KV
pressure. A plan has at most one, so that the next interval sees its effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prism.policies import kvpr
from prism.policies.bins import Bin, devices_of, need_bytes, part
from prism.policies.data import ClusterView, ModelView, Settings
from prism.policies.latency import busy_share, is_known, lateness
from prism.policies.planning import degrees
from prism.policies.planning.balance import late_rps_of_move, migrate, movable
from prism.policies.planning.builder import PlanBuilder

MakeRoom = Callable[[PlanBuilder, ModelView, Collection[Bin]], bool]
"""Evicts idle models so that all parts of a model fit into some of the bins. Returns False if it
evicts none."""


class Option(NamedTuple):
    """Move that may help a late model."""

    mover: ModelView
    # Degree and devices afterwards.
    tp: int
    home: Sequence[Bin]
    # Late requests per second of the devices involved.
    before: float
    after: float


LEAST_SAVED = 2.0
"""Late requests in one idle threshold that a migration must save."""

MOST_LATE = 8
"""Number of late models for which a plan considers moves, so that it does not take long."""


def shares(models: Iterable[ModelView]) -> dict[str, float]:
    """Returns device -> the part of the time that its models compute, for busy devices."""
    found: dict[str, float] = {}
    for model in models:
        if share := busy_share(model):
            for device in devices_of(model):
                found[device] = found.get(device, 0.0) + share
    return found


def share_of_others(model: ModelView, busy: Mapping[str, float]) -> float:
    """Returns the largest part of the time that other models compute on one of its devices.

    Args:
        busy: Result of `shares`.
    """
    own = busy_share(model)
    return max([0.0, *(busy.get(device, 0.0) - own for device in devices_of(model))])


def changes(view: ClusterView) -> list[tuple[ModelView, int | None]]:
    """Returns the models that are late, the most late requests first, then those that are early.

    Early ones have the lower degree that is enough, late ones None. Models with several copies are
    left out, and late ones that no other model delays and no degree helps.
    """
    copies = Counter(model.name for model in view.models)
    busy = shares(view.models)
    found: list[tuple[float, ModelView, int | None]] = []
    for model in view.models:
        if not is_known(model) or model.state != "active" or copies[model.name] > 1:
            continue
        others = share_of_others(model, busy)
        late = lateness(model, model.tp, others)
        if late > 1.0 and (others or degrees.higher(model, others)):
            found.append((-model.traffic.requests * (1 - 1 / late), model, None))
        elif model.tp > 1 and (enough := degrees.lower(model, others)) is not None:
            found.append((0.0, model, enough))
    return [(model, enough) for _, model, enough in sorted(found, key=lambda each: each[0])]


def relieve(
    builder: PlanBuilder, wanted: Sequence[tuple[ModelView, int | None]], make_room: MakeRoom
) -> None:
    """Adds at most one migration to the plan.

    For a late model it is the one after which the fewest requests are late on the devices involved:
    of the model, at any degree, or of another model from one of its devices. It must save more than
    tau of them. If there is none, idle models are evicted for a higher degree, and a later plan
    moves the model. The old copy serves until the new one is active, so they share no device.

    Args:
        wanted: Result of `changes`.
    """
    if not wanted:
        return
    late = [each for each in wanted if each[1] is None][:MOST_LATE]
    early = [each for each in wanted if each[1] is not None]
    busy = shares(builder.view.models)
    for model, enough in (*late, *early):
        if builder.is_changing(model.name):
            continue
        if enough is not None:
            if _lower(builder, model, enough):
                return
        elif _relieve(builder, model, busy) or _make_room(builder, model, make_room):
            return


def _lower(builder: PlanBuilder, model: ModelView, tp: int) -> bool:
    if not _may_move(builder, model) or (home := _home(builder, model, tp)) is None:
        return False
    if late_rps_of_move(builder, model, _part(model, tp), home)[1] > 0:
        return False
    migrate(builder, part(model), home, f"tp {tp} is enough, not {model.tp}", _part(model, tp))
    return True


def _relieve(builder: PlanBuilder, model: ModelView, busy: Mapping[str, float]) -> bool:
    found = [
        Option(mover, tp, home, *late_rps_of_move(builder, mover, _part(mover, tp), home))
        for mover, tp in _movers(builder, model)
        if (home := _home(builder, mover, tp)) is not None
    ]
    options = [o for o in found if _is_worth_it(o, builder.settings)]
    # Of overloaded devices all requests are late, before and after. The model alone may gain.
    options = options or _degree_alone(model, share_of_others(model, busy), found)
    if not options:
        return False
    best = min(options, key=lambda o: (o.after - o.before, o.tp, need_bytes(o.mover)))
    degree = f" with tp {best.tp}" if best.tp != best.mover.tp else ""
    saved_rps = best.before - best.after
    reason = f"{model.name} is late; {saved_rps:.2f} requests/s fewer are late{degree}"
    migrate(builder, part(best.mover), best.home, reason, _part(best.mover, best.tp))
    return True


def _is_worth_it(option: Option, settings: Settings) -> bool:
    saved = (option.before - option.after) * settings.idle_threshold_s
    gain = kvpr.gain(option.before, option.after)
    return saved >= LEAST_SAVED and gain > settings.migration_threshold


def _degree_alone(model: ModelView, others: float, found: Iterable[Option]) -> list[Option]:
    """Returns the move to the best higher degree among those after which no more are late."""
    harmless = {o.tp: o for o in found if o.mover is model and o.after <= o.before}
    return [harmless[tp] for tp in degrees.higher(model, others) if tp in harmless][:1]


def _make_room(builder: PlanBuilder, model: ModelView, make_room: MakeRoom) -> bool:
    if not _may_move(builder, model):
        return False
    bins = _candidates(builder, model)
    return any(make_room(builder, _part(model, tp), bins) for tp in degrees.higher(model, 0.0))


def _movers(builder: PlanBuilder, model: ModelView) -> Iterator[tuple[ModelView, int]]:
    """Yields the models whose move may help, and the degrees that they may have afterwards."""
    if _may_move(builder, model):
        yield from ((model, tp) for tp in sorted(model.degrees))
    whole = {m.name: m for m in builder.view.models}
    here = {
        m.name for d in devices_of(model) if d in builder.bins for m in movable(builder.bins[d])
    }
    for name in sorted(here - {model.name}):
        other = whole[name]
        if _may_move(builder, other):
            saved = sum(b.late_rps - b.late_without(name) for b in builder.held_by(other))
            if saved * builder.settings.idle_threshold_s >= LEAST_SAVED:
                yield other, other.tp


def _may_move(builder: PlanBuilder, model: ModelView) -> bool:
    free = model.owes_s <= 0 and model.pinned_device is None and model.name not in builder.copies
    return free and not builder.is_changing(model.name)


def _home(builder: PlanBuilder, model: ModelView, tp: int) -> tuple[Bin, ...] | None:
    there = _part(model, tp)
    need = need_bytes(there)
    free = {b.name: b for b in _candidates(builder, model) if b.gpu.free_bytes >= need}
    return kvpr.choose_devices(there, free)


def _candidates(builder: PlanBuilder, model: ModelView) -> list[Bin]:
    excluded = builder.changing().union(devices_of(model))
    return [b for b in builder.bins.values() if b.name not in excluded]


def _part(model: ModelView, tp: int) -> ModelView:
    return part(degrees.at_degree(model, tp))
