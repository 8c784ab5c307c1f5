"""The event kernel: callbacks in order of (time, sequence), so that a run depends on nothing else.

Plain functions instead of processes: an event is (time_s, callback, arguments). The sequence number
breaks ties in the order of scheduling.
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
    """A clock that jumps from event to event. Single-threaded; a `Clock` of the ports."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.time_s = start_s
        self.events = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, Callback, tuple[Any, ...]]] = []

    def now_s(self) -> float:
        return self.time_s

    def at(self, time_s: float, callback: Callback, *args: Any) -> None:
        """Call `callback(*args)` at `time_s`. REQUIRES: time_s is not before now."""
        if time_s < self.time_s:
            raise AssertionError(f"an event at {time_s!r} s, before now ({self.time_s!r} s)")
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, callback, args))

    def after(self, seconds: float, callback: Callback, *args: Any) -> None:
        """Call `callback(*args)` in `seconds` >= 0."""
        self.at(self.time_s + seconds, callback, *args)

    def run(self, until_s: float = float("inf")) -> None:
        """Process events until none is left or the next one is later than `until_s`."""
        heap, pop = self._heap, heapq.heappop
        with _few_collections():
            while heap and heap[0][0] <= until_s:
                self.time_s, _, callback, args = pop(heap)
                self.events += 1
                callback(*args)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Requests in flight are no garbage in cycles: Python need not look at all of them each few
    hundred events."""
    young, *others = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(young, *others)


class Alarm:
    """Calls `ring` at the earliest of the moments that were asked for since it last did."""

    def __init__(self, kernel: Kernel, ring: Callable[[], None]) -> None:
        self._kernel = kernel
        self._ring = ring
        self._due_s = inf

    def after(self, seconds: float) -> None:
        """Ring in `seconds` >= 0 at the latest; infinity: as was asked for before."""
        due_s = self._kernel.time_s + seconds
        if due_s < self._due_s:
            self._due_s = due_s
            self._kernel.at(due_s, self._came)

    def _came(self) -> None:
        if self._kernel.time_s == self._due_s:  # else an earlier one took its place
            self._due_s = inf
            self._ring()
