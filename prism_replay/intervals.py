"""Means over seeds, with Student's t confidence intervals.

scipy is not needed: degrees of freedom are whole numbers, for which the distribution has a closed
form (Abramowitz and Stegun, 26.7.3 and 26.7.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.95


class Interval(NamedTuple):
    """Interval from mean - half_width to mean + half_width. half_width is 0 for a single value."""

    mean: float
    half_width: float


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Returns the confidence interval of the mean of independent runs.

    If runs are about normally distributed, the intervals of a part `level` of all sets of seeds
    contain the mean over all seeds.
    """
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, 0.0)
    return Interval(mean, t_quantile(count - 1, level) * stdev(values) / math.sqrt(count))


@cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Returns t with P(-t < T < t) = level, up to rounding. REQUIRES: freedom >= 1,
    0 < level < 1."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Returns P(-t < T < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (n - 1) / n
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
