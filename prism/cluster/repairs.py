"""Repairs of differences between Redis and the agents, after a restart or a failed action.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from prism.cluster.state.actions import Move
from prism.cluster.state.agents import AgentBook
from prism.cluster.state.routes import Routes
from prism.cluster.state.scheduler_state import SchedulerState
from prism.messages.model_spec import ModelSpec


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
    routes, book, moves = state.routes, state.book, state.actions.moves
    gone = [name for name in routes.placement if name not in models]
    found: list[Repair] = [Route(name, (), "not in the configuration") for name in gone]
    found += _removals(book, models.keys())
    for name, model in models.items():
        placed = routes.placement.get(name, ())
        if any(_may_report(book, device, now_s) for device in placed):
            continue
        if name in moves:
            found += _repairs_during_action(moves[name], book, placed)
        else:
            found += _repairs_of(model, state, placed)
    return found


def _removals(book: AgentBook, names: Set[str]) -> list[Repair]:
    unknown = sorted(book.models() - names)
    active = {name: book.where(name, "active") for name in unknown}
    return [Remove(name, tuple(devices)) for name, devices in active.items() if devices]


def _repairs_of(model: ModelSpec, state: SchedulerState, placed: tuple[str, ...]) -> list[Repair]:
    name, routes, book = model.name, state.routes, state.book
    # If requests are bound to devices, a copy is wherever they are, and what waits is held.
    binds = state.policy.binds_requests
    if binds:
        route = _ordered(placed, book.where(name, "active", "activating"))
    else:
        route = _route_of(model, routes, book, placed)
    found: list[Repair] = []
    if route != placed:
        found.append(Route(name, route, f"it was routed to {', '.join(placed) or 'no device'}"))
    elif route and routes.unplaced.get(name) and not binds:
        found.append(Route(name, route, "requests waited although it is placed"))
    copies = [d for d in book.where(name, "active") if route and d not in route]
    return found + [DropCopy(name, copy, route[0]) for copy in copies[:1]]


def _repairs_during_action(move: Move, book: AgentBook, placed: tuple[str, ...]) -> list[Repair]:
    """Returns repairs of the route on devices that the model's action does not change.

    The action may take minutes, so they cannot wait for it.
    """
    name, changing = move.model, move.routes
    active = book.where(name, "active")
    others = tuple(device for device in active if device not in changing)
    serving = others or book.where(name, "active", "activating")
    lost = tuple(d for d in placed if d not in changing and d not in serving)
    return [Reroute(name, lost, others)] if lost or (others and not placed) else []


def _may_report(book: AgentBook, device: str, now_s: float) -> bool:
    return book.report(device) is None and not book.is_gone(device, now_s)


def _ordered(first: tuple[str, ...], devices: list[str]) -> tuple[str, ...]:
    """Returns `devices`, the ones in `first` before the others."""
    kept = [device for device in first if device in devices]
    return (*kept, *(device for device in devices if device not in kept))


def _route_of(
    model: ModelSpec, routes: Routes, book: AgentBook, placed: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the devices that requests should be routed to.

    A copy that its agent is restarting is left out until it is active, if others serve: it would
    look idle and attract requests. If the placement is lost, active copies replace it.
    """
    name, most = model.name, model.replicas_max
    active = book.where(name, "active")
    serving = active or book.where(name, "activating")
    kept = [device for device in placed if device in serving]
    if not kept:
        return tuple(active[:most] or serving[:1])
    again = routes.reviving.get(name, frozenset()).difference(kept)
    back = [device for device in active if device in again]
    return (*kept, *back[: max(0, most - len(kept))])
