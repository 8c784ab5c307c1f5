"""Shares of one device's KV memory for servers that admit requests themselves.

Servers take pages as they need them, and nothing is limited while there is room. When there is
none, a server gets what its open requests want, up to a part of the room in proportion to the KV
pressure of one request (Prism, section 6.1): its KV over the server's TPOT SLO. Unlike in the
placement of models, the rate of requests does not count: a flooded model is given another device
there, and here it would take the memory of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerDemand:
    """Demand of one server."""

    floor_bytes: int
    """KV that the server always keeps: of one request of its full context."""
    wanted_bytes: int
    """KV of its open requests; 0 if it is idle."""
    slo_tpot_s: float
    held_bytes: int = 0
    most_bytes: int | None = None
    """Limit by its operator. None: only the device limits it."""


@dataclass(frozen=True)
class MemoryShare:
    """Guaranteed and greatest KV of one server."""

    min_bytes: int
    limit_bytes: int


def memory_shares(room_bytes: int, demands: Sequence[ServerDemand]) -> list[MemoryShare]:
    """Returns the share of each server. If the floors fit, the limits add up to at most
    `room_bytes`.

    Each server gets its floor. Busy ones then get what they want, up to their part by pressure.
    Idle ones keep what they hold as far as that leaves room, and the rest goes to the busy ones. A
    server's minimum is what it wants within its limit.
    """
    limits = _divided(room_bytes, demands)
    return [
        MemoryShare(max(d.floor_bytes, min(limit, d.wanted_bytes)), limit)
        for d, limit in zip(demands, limits, strict=True)
    ]


def _divided(room_bytes: int, demands: Sequence[ServerDemand]) -> list[int]:
    limits = [d.floor_bytes for d in demands]
    pressures = [(1 + d.floor_bytes) / d.slo_tpot_s if d.wanted_bytes else 0 for d in demands]
    kept = [0 if d.wanted_bytes else d.held_bytes for d in demands]
    _raise(limits, room_bytes, [_at_most(d, d.wanted_bytes) for d in demands], pressures)
    _raise(limits, room_bytes, list(map(_at_most, demands, kept)), kept)
    _raise(limits, room_bytes, [_at_most(d, room_bytes) for d in demands], pressures)
    return limits


def _raise(
    limits: list[int], room_bytes: int, most: Sequence[int], weights: Sequence[float]
) -> None:
    """Raises each limit up to `most`, in proportion to the weights, as far as there is room."""
    below = {i for i, limit in enumerate(limits) if limit < most[i] and weights[i] > 0}
    while below and (left := room_bytes - sum(limits)) > 0:
        total = sum(weights[i] for i in below)
        parts = {i: int(left * weights[i] / total) for i in below}
        full = {i for i in below if limits[i] + parts[i] >= most[i]}
        for i in full or below:
            limits[i] = min(most[i], limits[i] + parts[i])
        below = below - full if full else set()


def _at_most(demand: ServerDemand, size_bytes: int) -> int:
    return size_bytes if demand.most_bytes is None else min(size_bytes, demand.most_bytes)
