"""Interleaved pairs of timings: two things measured alternately, so a busy machine slows both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True)
class Pairs:
    """Seconds of both things in each pair, and the median of the ratios first / second."""

    first_s: list[float]
    second_s: list[float]

    @property
    def ratio(self) -> float:
        """Median over the pairs."""
        return median(a / b for a, b in zip(self.first_s, self.second_s, strict=True))

    def line(self, name: str, target: str, unit: str, first: float, second: float) -> str:
        """Returns a line with the medians, divided by the seconds of one `unit` of each."""
        a, b = median(self.first_s) / first, median(self.second_s) / second
        ratio = self.ratio / first * second
        return f"{name:44} {a:9.3f} against {b:9.3f} {unit}: ratio {ratio:7.3f} ({target})"


def measure(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.thread_time,
    clean: Callable[[], object] = lambda: None,
) -> Pairs:
    """Runs both alternately `pairs` times, after one warm-up each.

    The default clock is the CPU time of this thread including the kernel, because the machine may
    be busy. `clean` runs after each call and is not timed.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs + 1):
        for call, seconds in ((first, taken[0]), (second, taken[1])):
            begin_s = clock()
            call()
            seconds.append(clock() - begin_s)
            clean()
    return Pairs(taken[0][1:], taken[1][1:])


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Returns an interval that contains the true median with at least this probability.

    It is made of order statistics (inversion of the sign test), so it holds for any distribution.
    With fewer than six values no such interval is bounded. Then it is the smallest and the largest.
    """
    ordered, count = sorted(values), len(values)
    tail, cut = 0.0, 0
    while cut < count // 2:
        tail += comb(count, cut) / 2**count
        if tail > (1 - confidence) / 2:
            break
        cut += 1
    low = max(0, cut - 1)
    return ordered[low], ordered[count - 1 - low]
