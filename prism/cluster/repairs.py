"""Repairs of differences between Redis and the agents, after a restart or a failed action.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from prism.cluster.state.scheduler_state import SchedulerState
from prism.messages.models import ModelSpec


@dataclass(frozen=True, slots=True)
class Route:
    """Sets the placement of `model` in Redis to `devices`, and moves waiting requests there."""

    model: str
    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Evicts a second copy of `model` from `device`; its requests are routed to `served_by`."""

    model: str
    device: str
    served_by: str


@dataclass(frozen=True, slots=True)
class Reroute:
    """Removes devices from the route of a model that has an action in progress."""

    model: str
    lost: tuple[str, ...]  # devices to remove
    instead: tuple[str, ...]  # the route if no device is left


@dataclass(frozen=True, slots=True)
class Remove:
    """Evicts a model that is active on `devices` and not in the configuration."""

    model: str
    devices: tuple[str, ...]


Repair = Route | DropCopy | Reroute | Remove


def repairs(state: SchedulerState, now_s: float) -> list[Repair]:
    """Returns the repairs to make now.

    Excludes models that are placed on a device whose agent may still report, and devices that an
    action in progress is changing.
    """
    models = {model.name: model for model in state.config.models}
    gone = [name for name in state.placement if name not in models]
    found: list[Repair] = [Route(name, (), "not in the configuration") for name in gone]
    found += _removals(state, models.keys())
    for name, model in models.items():
        placed = state.placement.get(name, ())
        if any(_may_report(state, device, now_s) for device in placed):
            continue
        if name in state.moves:
            found += _repairs_during_action(state, name, placed)
        else:
            found += _repairs_of(state, model, placed)
    return found


def _removals(state: SchedulerState, names: Set[str]) -> list[Repair]:
    unknown = sorted(state.book.models() - names)
    active = {name: state.book.where(name, "active") for name in unknown}
    return [Remove(name, tuple(devices)) for name, devices in active.items() if devices]


def _repairs_of(state: SchedulerState, model: ModelSpec, placed: tuple[str, ...]) -> list[Repair]:
    name, route = model.name, _route_of(state, model, placed)
    found: list[Repair] = []
    if route != placed:
        found.append(Route(name, route, f"it was routed to {', '.join(placed) or 'no device'}"))
    elif route and state.unplaced.get(name):
        found.append(Route(name, route, "requests waited although it is placed"))
    copies = [d for d in state.book.where(name, "active") if route and d not in route]
    return found + [DropCopy(name, copy, route[0]) for copy in copies[:1]]


def _repairs_during_action(
    state: SchedulerState, name: str, placed: tuple[str, ...]
) -> list[Repair]:
    """Returns repairs of the route on devices that the model's action does not change.

    The action may take minutes, so they cannot wait for it.
    """
    changing, active = state.moves[name].routes, state.book.where(name, "active")
    others = tuple(device for device in active if device not in changing)
    serving = others or state.book.where(name, "active", "activating")
    lost = tuple(d for d in placed if d not in changing and d not in serving)
    return [Reroute(name, lost, others)] if lost or (others and not placed) else []


def _may_report(state: SchedulerState, device: str, now_s: float) -> bool:
    return state.book.report(device) is None and not state.book.is_gone(device, now_s)


def _route_of(state: SchedulerState, model: ModelSpec, placed: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the devices that requests should be routed to.

    A copy that its agent is restarting is left out until it is active, if others serve: it would
    look idle and attract requests. If the placement is lost, active copies replace it.
    """
    name, most = model.name, model.replicas_max
    active = state.book.where(name, "active")
    serving = active or state.book.where(name, "activating")
    kept = [device for device in placed if device in serving]
    if not kept:
        return tuple(active[:most] or serving[:1])
    again = state.reviving.get(name, frozenset()).difference(kept)
    back = [device for device in active if device in again]
    return (*kept, *back[: max(0, most - len(kept))])
