"""Deterministic event kernel.

An event is (time_s, callback, arguments). Events run in order of (time, sequence number): ties are
broken by the order of scheduling.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

Callback = Callable[..., None]
YOUNG_OBJECTS = 100_000


class Kernel:
    """Clock that jumps from event to event. Single-threaded; implements the port `Clock`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.time_s = start_s
        self.events = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, Callback, tuple[Any, ...]]] = []

    def now_s(self) -> float:
        return self.time_s

    def at(self, time_s: float, callback: Callback, *args: Any) -> None:
        """Schedules `callback(*args)` at `time_s`. REQUIRES: time_s is not before now."""
        if time_s < self.time_s:
            raise AssertionError(f"an event at {time_s!r} s, before now ({self.time_s!r} s)")
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, callback, args))

    def after(self, seconds: float, callback: Callback, *args: Any) -> None:
        """Schedules `callback(*args)` in `seconds` >= 0."""
        self.at(self.time_s + seconds, callback, *args)

    def run(self, until_s: float = float("inf")) -> None:
        """Processes events until none is left or the next one is later than `until_s`."""
        heap, pop = self._heap, heapq.heappop
        with _rare_collections():
            while heap and heap[0][0] <= until_s:
                self.time_s, _, callback, args = pop(heap)
                self.events += 1
                callback(*args)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collects garbage less often: requests in flight are not cyclic garbage, and Python would scan
    all of them every few hundred events."""
    young, *others = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(young, *others)


class Alarm:
    """Timer that fires once, at the earliest of the times requested since it last fired."""

    def __init__(self, kernel: Kernel, fire: Callable[[], None]) -> None:
        self._kernel = kernel
        self._fire = fire
        self._due_s = inf

    def after(self, seconds: float) -> None:
        """Fires in `seconds` >= 0 at the latest. Infinity changes nothing."""
        due_s = self._kernel.time_s + seconds
        if due_s < self._due_s:
            self._due_s = due_s
            self._kernel.at(due_s, self._on_due)

    def _on_due(self) -> None:
        if self._kernel.time_s == self._due_s:  # else an earlier time replaced this one
            self._due_s = inf
            self._fire()
