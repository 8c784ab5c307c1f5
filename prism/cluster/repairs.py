"""Repairs where Redis and the agents disagree: after a restart, or an action that failed half-way.

Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from prism.cluster.state import SchedulerState
from prism.messages.models import ModelSpec


@dataclass(frozen=True, slots=True)
class Route:
    """Placement of `model` in Redis becomes `devices`; its waiting requests go there."""

    model: str
    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DropCopy:
    """`model` is active on `device` as well as on `home`, where its requests go."""

    model: str
    device: str
    home: str


@dataclass(frozen=True, slots=True)
class Reroute:
    """An action of `model` is under way: only the devices `lost` leave the route. With none left
    it is `instead`."""

    model: str
    lost: tuple[str, ...]
    instead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """`model` is active on these, and not in the configuration."""

    model: str
    devices: tuple[str, ...]


Repair = Route | DropCopy | Reroute | Remove


def repairs(state: SchedulerState, now_s: float) -> list[Repair]:
    """Leaves out devices of actions under way, and those whose agent may still come."""
    models = {model.name: model for model in state.config.models}
    gone = [name for name in state.placement if name not in models]
    mended: list[Repair] = [Route(name, (), "not in the configuration") for name in gone]
    mended += _removals(state, models.keys())
    for name, model in models.items():
        placed = state.placement.get(name, ())
        if any(_may_come(state, device, now_s) for device in placed):
            continue
        if name in state.moves:
            mended += _mend_beside(state, name, placed)
        else:
            mended += _mend(state, model, placed)
    return mended


def _removals(state: SchedulerState, names: Set[str]) -> list[Repair]:
    strange = sorted(state.book.models() - names)
    active = {name: state.book.where(name, "active") for name in strange}
    return [Remove(name, tuple(devices)) for name, devices in active.items() if devices]


def _mend(state: SchedulerState, model: ModelSpec, placed: tuple[str, ...]) -> list[Repair]:
    name, homes = model.name, _homes(state, model, placed)
    mended: list[Repair] = []
    if homes != placed:
        mended.append(Route(name, homes, f"it was routed to {', '.join(placed) or 'no device'}"))
    elif homes and state.unplaced.get(name):
        mended.append(Route(name, homes, "requests waited although it is placed"))
    copies = [d for d in state.book.where(name, "active") if homes and d not in homes]
    return mended + [DropCopy(name, copy, homes[0]) for copy in copies[:1]]


def _mend_beside(state: SchedulerState, name: str, placed: tuple[str, ...]) -> list[Repair]:
    """The action may take minutes: its devices are left to it, the others are not."""
    mine, active = state.moves[name].routes, state.book.where(name, "active")
    others = tuple(device for device in active if device not in mine)
    serving = others or state.book.where(name, "active", "activating")
    lost = tuple(device for device in placed if device not in mine and device not in serving)
    return [Reroute(name, lost, others)] if lost or (others and not placed) else []


def _may_come(state: SchedulerState, device: str, now_s: float) -> bool:
    return state.book.report(device) is None and not state.book.is_gone(device, now_s)


def _homes(state: SchedulerState, model: ModelSpec, placed: tuple[str, ...]) -> tuple[str, ...]:
    """A copy that its agent brings up again gives its place to those that serve: it would look
    idle to requests. It joins them when it is up. A placement that is lost is where the model is
    active."""
    name, most = model.name, model.replicas_max
    active = state.book.where(name, "active")
    serving = active or state.book.where(name, "activating")
    kept = [device for device in placed if device in serving]
    if not kept:
        return tuple(active[:most] or serving[:1])
    again = state.reviving.get(name, frozenset()).difference(kept)
    back = [device for device in active if device in again]
    return (*kept, *back[: max(0, most - len(kept))])
