"""Repairs where Redis and the agents disagree: after a restart, or an action that failed half-way.

Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prism.cluster.state import SchedulerState


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


Repair = Route | DropCopy


def repairs(state: SchedulerState, now_s: float) -> list[Repair]:
    """Leaves out models with an action under way, and devices whose agent may still come."""
    names = [model.name for model in state.config.models]
    gone = [name for name in state.placement if name not in names]
    mended: list[Repair] = [Route(name, (), "not in the configuration") for name in gone]
    for name in names:
        if name not in state.moves:
            mended += _mend(state, name, now_s)
    return mended


def _mend(state: SchedulerState, name: str, now_s: float) -> list[Repair]:
    placed = state.placement.get(name, ())
    if any(_may_come(state, device, now_s) for device in placed):
        return []
    homes = _homes(state, name, placed)
    mended: list[Repair] = []
    if homes != placed:
        mended.append(Route(name, homes, f"it was routed to {', '.join(placed) or 'no device'}"))
    elif homes and state.unplaced.get(name):
        mended.append(Route(name, homes, "requests waited although it is placed"))
    copies = [d for d in state.book.where(name, "active") if homes and d not in homes]
    return mended + [DropCopy(name, copy, homes[0]) for copy in copies[:1]]


def _may_come(state: SchedulerState, device: str, now_s: float) -> bool:
    return state.book.report(device) is None and not state.book.is_gone(device, now_s)


def _homes(state: SchedulerState, name: str, placed: tuple[str, ...]) -> tuple[str, ...]:
    """Of several copies one that its agent brings up again keeps its place; one that is alone gives
    it to a copy that serves."""
    active = state.book.where(name, "active")
    serving = active or state.book.where(name, "activating")
    if len(placed) > 1:
        serving = state.book.where(name, "active", "activating")
    kept = tuple(device for device in placed if device in serving)
    return kept or tuple(serving[:1])
