"""Latest actions with their reasons, for the published status."""

from __future__ import annotations

import itertools

import msgspec

from prism import clock
from prism.messages.cluster import Decision

LATEST_MAX = 32


class Decisions:
    """Log of the latest actions. `ended` takes the number that `began` returned."""

    def __init__(self) -> None:
        self._latest: dict[int, Decision] = {}
        self._numbers = itertools.count()

    def began(self, kind: str, model: str, device: str, target: str, reason: str) -> int:
        number = next(self._numbers)
        self._latest[number] = Decision(clock.unix_s(), kind, model, device, target, reason)
        if len(self._latest) > LATEST_MAX:
            del self._latest[next(iter(self._latest))]
        return number

    def ended(self, number: int, problem: str) -> None:
        if (began := self._latest.get(number)) is not None:
            seconds = max(0.0, clock.unix_s() - began.time_unix_s)
            ended = msgspec.structs.replace(began, problem=problem, seconds=seconds)
            self._latest[number] = ended

    def latest(self) -> list[Decision]:
        """Returns the decisions in the order in which they began."""
        return list(self._latest.values())
