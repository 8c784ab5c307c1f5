"""Repairs where Redis and the agents disagree: after a restart, or an action that failed half-way.

Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prism.cluster.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Route:
    """Placement of `model` in Redis becomes `device`; its waiting requests go there."""

    model: str
    device: str | None
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
    mended: list[Repair] = [Route(name, None, "not in the configuration") for name in gone]
    for name in names:
        if name not in state.moves:
            mended += _mend(state, name, now_s)
    return mended


def _mend(state: SchedulerState, name: str, now_s: float) -> list[Repair]:
    placed = state.placement.get(name)
    if placed is not None and _may_come(state, placed, now_s):
        return []
    home = _home(state, name, placed)
    mended: list[Repair] = []
    if home != placed:
        mended.append(Route(name, home, f"it was routed to {placed or 'no device'}"))
    elif home is not None and state.unplaced.get(name):
        mended.append(Route(name, home, "requests waited although it is placed"))
    copies = [d for d in state.book.where(name, "active") if home is not None and d != home]
    return mended + [DropCopy(name, copy, home) for copy in copies[:1] if home is not None]


def _may_come(state: SchedulerState, device: str, now_s: float) -> bool:
    return state.book.report(device) is None and not state.book.is_gone(device, now_s)


def _home(state: SchedulerState, name: str, placed: str | None) -> str | None:
    serving = state.book.where(name, "active") or state.book.where(name, "activating")
    if placed in serving:
        return placed
    return serving[0] if serving else None
