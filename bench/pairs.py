"""Interleaved pairs of timings: two things measured in turn, so that both see the same machine."""

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
        """One line: medians in `unit`, after division by what each count of seconds stands for."""
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
    """Runs both in turn `pairs` times, once more before to warm up.

    By default CPU time of this thread, with the kernel's share, since the machine may be busy with
    other work. `clean` runs after each call, outside of the timing.
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
    """An interval that holds the true median with at least this probability.

    By order statistics (the sign test turned round), so for any distribution of the values. With
    fewer than six values no such interval is bounded: then the smallest and the largest.
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
