"""QLM (SoCC 2024): requests in groups, groups in virtual queues, one model per GPU at a time.

Requests of one model and one SLO form groups in order of arrival. A group is added to the virtual
queue of a serving instance. Groups in a queue are ordered so that the fewest requests miss their
SLO, by estimated waiting times: output tokens ahead / throughput, plus a swap at each change of
model (QLM §5, §6). The first group's model is swapped in when the instance has no running requests.
A swap restarts the engine (Prism §7.5). A group is assigned to the instance with the least
estimated waiting time. `qlm-first-idle` assigns it to the first one with an empty queue, whatever
model that holds, as Prism §7.5 found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prism.policies.baselines import dedicated
from prism.policies.baselines.mux_placement import computation
from prism.policies.bins import devices_of
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    Evict,
    ModelView,
    Refuse,
    Settings,
)
from prism.policies.placement import Hosted, ModelSpecView, Placement, Problem, Unit
from prism.policies.policy import ADMISSION_ORDER, PLACEMENT_SEARCH, VIRTUAL_QUEUES, Policy
from prism.policies.queues import (
    QueueDevice,
    QueuedRequest,
    QueueView,
    RequestGroup,
    VirtualQueue,
)

REORDERED_MAX = 12
"""Length of a queue up to which all its groups are reordered for a new group."""


@dataclass(frozen=True, slots=True)
class QlmSettings:
    """Parameters of QLM."""

    # Largest number of requests in a group, a few batches (QLM §5).
    group_requests_max: int = 64
    # Choose the first idle instance instead of the one with the least estimated waiting time,
    # including swaps. The weakness that Prism §7.5 describes.
    first_idle: bool = False
    # Order a queue with unavoidably late groups by deadline, as in QLM's published code, instead of
    # by the fewest late requests. An ablation: it swaps far more and serves far fewer in time.
    by_deadline: bool = False


SHIPPED = QlmSettings()


def assign(view: QueueView, settings: QlmSettings = SHIPPED) -> tuple[VirtualQueue, ...]:
    """Assigns waiting requests to groups, and new groups to queues where they cost least.

    Requests of models that no instance serves are left out.
    """
    by_id = {r.id: r for r in view.waiting}
    queues: Queues = {d.name: [] for d in view.devices}
    queues |= _kept(view, by_id)
    queued = {id for groups in queues.values() for g in groups for id in g.requests}
    fresh = sorted((r for r in view.waiting if r.id not in queued), key=_by_arrival)
    for group in _grouped(fresh, queues, settings.group_requests_max):
        device = _instance_for(group, view, queues, settings.first_idle)
        if device is not None:
            inserted = _inserted(group, queues[device.name], device, view)
            queues[device.name] = _ordered(inserted, device, view, settings)
    return tuple(VirtualQueue(name, tuple(groups)) for name, groups in sorted(queues.items()))


Queues = dict[str, list[RequestGroup]]


def _by_arrival(request: QueuedRequest) -> tuple[float, str]:
    return (request.arrival_s, request.id)


def _kept(view: QueueView, by_id: Mapping[str, QueuedRequest]) -> Queues:
    """Returns the queues of existing instances, without requests that no longer wait and models
    that their instance no longer serves."""
    serves = {d.name: d.serves for d in view.devices}
    kept: Queues = {}
    for queue in view.queues:
        if queue.device in serves:
            left = (_without(g, by_id) for g in queue.groups if g.model in serves[queue.device])
            kept[queue.device] = [g for g in left if g.requests]
    return kept


def _without(group: RequestGroup, by_id: Mapping[str, QueuedRequest]) -> RequestGroup:
    left = [by_id[id] for id in group.requests if id in by_id]
    if len(left) == len(group.requests):
        return group
    deadline_s = min((r.deadline_s for r in left), default=group.deadline_s)
    tokens = sum(r.output_tokens for r in left)
    ids = tuple(r.id for r in left)
    return replace(group, deadline_s=deadline_s, requests=ids, output_tokens=tokens)


def _grouped(fresh: Sequence[QueuedRequest], queues: Queues, most: int) -> list[RequestGroup]:
    """Adds requests to queued groups with room. Returns new groups of the others."""
    open_: dict[tuple[str, float], list[QueuedRequest]] = {}
    done: list[RequestGroup] = []
    for request in fresh:
        if _join(request, queues, most):
            continue
        key = (request.model, _slo_s(request))
        members = open_.setdefault(key, [])
        members.append(request)
        if len(members) == most:
            done.append(_named(members))
            del open_[key]
    made = [*done, *(_named(members) for members in open_.values())]
    return sorted(made, key=lambda g: (g.deadline_s, g.id))


def _slo_s(request: QueuedRequest) -> float:
    return round(request.deadline_s - request.arrival_s, 6)


def _named(members: Sequence[QueuedRequest]) -> RequestGroup:
    first = members[0]
    return RequestGroup(
        id=first.id,
        model=first.model,
        slo_s=_slo_s(first),
        deadline_s=min(r.deadline_s for r in members),
        requests=tuple(r.id for r in members),
        output_tokens=sum(r.output_tokens for r in members),
    )


def _join(request: QueuedRequest, queues: Queues, most: int) -> bool:
    """Adds the request to the newest group of its kind with room. Returns False without one."""
    kind = (request.model, _slo_s(request))
    for groups in queues.values():
        for i in range(len(groups) - 1, -1, -1):
            group = groups[i]
            if (group.model, group.slo_s) == kind and len(group.requests) < most:
                groups[i] = replace(
                    group,
                    requests=(*group.requests, request.id),
                    deadline_s=min(group.deadline_s, request.deadline_s),
                    output_tokens=group.output_tokens + request.output_tokens,
                )
                return True
    return False


# --- queues --------------------------------------------------------------------------------


def _instance_for(
    group: RequestGroup, view: QueueView, queues: Queues, first_idle: bool
) -> QueueDevice | None:
    able = [d for d in view.devices if group.model in d.serves]
    if not first_idle:
        ends = [(waiting_s([*queues[d.name], group], d, view)[-1], d.name, d) for d in able]
        return min(ends, default=(0.0, "", None), key=lambda e: e[:2])[2]
    idle = [d for d in able if not queues[d.name] and not d.running]
    if idle:
        return min(idle, key=lambda d: d.name)
    return min(able, key=lambda d: (_work_s(queues[d.name], view), d.name), default=None)


def _work_s(groups: Iterable[RequestGroup], view: QueueView) -> float:
    return sum(g.output_tokens / view.tokens_per_s[g.model] for g in groups)


def waiting_s(groups: Sequence[RequestGroup], device: QueueDevice, view: QueueView) -> list[float]:
    """Returns the estimated time until each group starts, in this order."""
    found: list[float] = []
    ahead_s, model = 0.0, device.model
    for group in groups:
        if group.model != model:
            ahead_s += view.swap_s[group.model]
            model = group.model
        found.append(ahead_s)
        ahead_s += group.output_tokens / view.tokens_per_s[group.model]
    return found


def _inserted(
    group: RequestGroup, groups: list[RequestGroup], device: QueueDevice, view: QueueView
) -> list[RequestGroup]:
    """Returns the queue with `group` inserted at the position with the least cost."""
    options = [[*groups[:i], group, *groups[i:]] for i in range(len(groups), -1, -1)]
    return min(options, key=_ranked(device, view))


def _ordered(
    groups: list[RequestGroup], device: QueueDevice, view: QueueView, settings: QlmSettings
) -> list[RequestGroup]:
    """Returns the queue in the best order that was found.

    If some group is late in it, the settings may ask for the order by deadline instead.
    """
    best = _improved(groups, device, view)
    if settings.by_deadline and _cost(best, device, view)[0]:
        return sorted(best, key=lambda g: (g.deadline_s, g.id))
    return best


def _improved(
    groups: list[RequestGroup], device: QueueDevice, view: QueueView
) -> list[RequestGroup]:
    """Reinserts each group at its best position, so that groups of one model can come together.

    Short queues only, since the work grows with the cube of the length.
    """
    if len(groups) <= REORDERED_MAX:
        for group in tuple(groups):
            rest = [g for g in groups if g is not group]
            groups = min(groups, _inserted(group, rest, device, view), key=_ranked(device, view))
    return groups


def _ranked(
    device: QueueDevice, view: QueueView
) -> Callable[[list[RequestGroup]], tuple[int, float, float]]:
    return lambda order: _cost(order, device, view)


def _cost(
    order: Sequence[RequestGroup], device: QueueDevice, view: QueueView
) -> tuple[int, float, float]:
    """Returns (requests in late groups, total lateness, total waiting time) in seconds."""
    late, lateness_s, total_s = 0, 0.0, 0.0
    for group, wait_s in zip(order, waiting_s(order, device, view), strict=True):
        over_s = view.now_s + wait_s - group.deadline_s
        if over_s > 0:
            late += len(group.requests)
            lateness_s += over_s * len(group.requests)
        total_s += wait_s * len(group.requests)
    return (late, round(lateness_s, 9), round(total_s, 9))


# --- swapping ------------------------------------------------------------------------------


def plan(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Swaps in the model of each queue's first group when its instance has no running requests.

    `settings` is not used.
    """
    residents: dict[str, list[ModelView]] = {}
    for model in view.models:
        for device in devices_of(model):
            residents.setdefault(device, []).append(model)
    by_name = {m.name: m for m in view.models}
    ready = _ready(view)
    peers = {u.devices[0]: u.devices[1:] for u in view.target.units} if view.target else {}
    actions: list[Action] = []
    for queue in view.queues:
        # A reload may have removed the model since the assignment.
        first = by_name.get(queue.groups[0].model) if queue.groups else None
        ranks = (queue.device, *peers.get(queue.device, ()))
        if first is not None and ready.issuperset(ranks):
            actions.extend(_swap(first, ranks, residents))
    actions.extend(_first_models(view, residents))
    actions.extend(_refusals(view))
    return tuple(actions)


def _ready(view: ClusterView) -> set[str]:
    """Returns the devices that take models, without those that others than in the view are on."""
    return {gpu.name for gpu in view.gpus if gpu.alive and not gpu.fixed_bytes}


def _first_models(
    view: ClusterView, residents: Mapping[str, list[ModelView]]
) -> Iterator[Activate]:
    """Yields initial activations: on each free instance its first wanted model.

    Yields nothing once requests are queued.
    """
    if any(queue.groups for queue in view.queues) or view.target is None:
        return
    ready = _ready(view)
    wanted = {m.name: m for m in view.models if m.state == "absent" and m.wanted}
    for unit in view.target.units:
        free = ready.issuperset(unit.devices) and not any(d in residents for d in unit.devices)
        able = (h.model for h in unit.models if h.model in wanted)
        name = next((n for n in able if unit.devices[0] not in wanted[n].barred), None)
        if free and name is not None:
            del wanted[name]
            yield Activate(name, unit.devices[0], "initial placement", peers=unit.devices[1:])


def _swap(
    model: ModelView, ranks: tuple[str, ...], residents: Mapping[str, list[ModelView]]
) -> list[Action]:
    there = {m.name: m for device in ranks for m in residents.get(device, ())}
    if model.name in there or ranks[0] in model.barred:
        return []
    if any(m.running or m.state != "active" for m in there.values()):
        return []
    why = f"the queue of {ranks[0]} continues with {model.name}"
    evictions: list[Action] = [Evict(m.name, devices_of(m)[0], why) for m in there.values()]
    reason = "first in the queue; the engine restarts"
    return [*evictions, Activate(model.name, ranks[0], reason, peers=ranks[1:])]


def _refusals(view: ClusterView) -> list[Action]:
    """Returns refusals of models with requests that no instance serves.

    Queues may be out of date, so models that an instance can serve are not refused, even if their
    requests are in no queue. An instance on which a model failed to load cannot serve it for now.
    """
    units = view.target.units if view.target else ()
    barred = {model.name: model.barred for model in view.models}
    served = {
        hosted.model
        for unit in units
        for hosted in unit.models
        if unit.devices[0] not in barred.get(hosted.model, ())
    }
    served |= {g.model for q in view.queues for g in q.groups}
    absent = (m for m in view.models if m.state == "absent" and m.waiting)
    lost = (m for m in absent if m.name not in served)
    return [Refuse(m.name, "no serving instance can hold it") for m in lost]


# --- instances -----------------------------------------------------------------------------


def search(problem: Problem) -> Placement:
    """Returns the serving instances as units, each with all models that it may hold in turn.

    Models of a unit are sorted by decreasing computation. Devices are divided by computation among
    the TP degrees that the models need, at least one instance per degree. The models of a degree
    without devices are refused.
    """
    capacity = min((d.capacity_bytes for d in problem.devices), default=0)
    classes: dict[int, list[ModelSpecView]] = {}
    refused: dict[str, str] = {}
    for model in problem.models:
        degree = dedicated.least_degree(model, capacity)
        if degree is None:
            refused[model.name] = "its weights fit at none of its TP degrees"
        else:
            classes.setdefault(degree, []).append(model)
    found = instances(classes, problem)
    for models in classes.values():
        models.sort(key=computation, reverse=True)
    units = tuple(
        Unit(devices, tuple(Hosted(m.name) for m in classes[len(devices)])) for devices in found
    )
    served = {u.tp for u in units}
    for degree in classes.keys() - served:
        refused |= {m.name: f"no {degree} devices are left" for m in classes[degree]}
    return Placement(units, refused)


def instances(
    classes: Mapping[int, Sequence[ModelSpecView]], problem: Problem, least: int = 1
) -> list[tuple[str, ...]]:
    """Returns the devices of each instance.

    Each degree gets `least` instances, widest first, or none. The remaining devices go to the
    degree with the most computation per device.
    """
    sizes: dict[str, int] = {}
    for degree in sorted(classes, reverse=True):
        first = {f"{degree}/{number}": degree for number in range(least)}
        if dedicated.pack({**sizes, **first}, problem.devices) is not None:
            sizes |= first
    open_ = set(sizes.values())
    while open_:
        held = {degree: sum(s for s in sizes.values() if s == degree) for degree in open_}
        work = {d: sum(computation(m) for m in classes[d]) / held[d] for d in open_}
        degree = max(open_, key=lambda d: (work[d], d))
        grown = {**sizes, f"{degree}/{held[degree] // degree}": degree}
        if dedicated.pack(grown, problem.devices) is None:
            open_.remove(degree)
        else:
            sizes = grown
    packed = dedicated.pack(sizes, problem.devices)
    assert packed is not None
    return sorted(packed.values())


POLICY = Policy(
    "qlm",
    plan,
    frozenset({ADMISSION_ORDER, PLACEMENT_SEARCH, VIRTUAL_QUEUES}),
    search=search,
    assign=assign,
    restarts_engine=True,
)
# The first idle instance, as in Prism §7.5, instead of QLM's own estimate.
FIRST_IDLE = replace(
    POLICY, name="qlm-first-idle", assign=partial(assign, settings=QlmSettings(first_idle=True))
)
