"""Seeded synthetic traces of many models.

Each kind of traffic is a subclass of GeneratorConfig, which draws the arrivals of its models.
`stats.describe` measures the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from prism.errors import ConfigError
from prism_replay.lengths import ARENA, Floats, LengthSource, requests_at
from prism_replay.slo import Slo, with_slos
from prism_replay.trace import REQUESTS_MAX, SECONDS_MAX, TraceRequest

Arrivals = tuple[Floats, np.random.Generator]
"""A model's sorted arrival times (s), and the random generator for its lengths."""

GAP_CV_MIN, GAP_CV_MAX = 1e-6, 1e3
TAIL_MODELS = 0.6
TAIL_REQUESTS = 0.25


@dataclass(frozen=True)
class GeneratorConfig:
    """Settings that all kinds of traffic share."""

    models: tuple[str, ...]
    """Model names, the most popular first."""
    seconds: float = 3600.0
    rate_rps: float = 1.0
    """Average rate of all models together."""
    seed: int = 0
    lengths: LengthSource = ARENA

    POSITIVE: ClassVar[tuple[str, ...]] = ("seconds", "rate_rps")
    """Fields that must be > 0 and finite."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range."""
        if not self.models:
            raise ConfigError("models: name at least one model")
        for key in self.POSITIVE:
            value = getattr(self, key)
            if not 0 < value < math.inf:
                name = key.removesuffix("_rps")
                raise ConfigError(f"{name}: {value:g} must be > 0 and finite")
        if self.seconds > SECONDS_MAX:
            raise ConfigError(f"seconds: {self.seconds:g} must be <= {SECONDS_MAX:g}")
        if self.rate_rps * self.seconds > REQUESTS_MAX:
            raise ConfigError(
                f"rate: {self.rate_rps:g} requests/s over {self.seconds:g} s are more than"
                f" {REQUESTS_MAX:,} requests, the maximum; lower the rate or the time"
            )
        if self.seed < 0:
            raise ConfigError(f"seed: {self.seed} must be >= 0")

    def arrivals(self) -> Iterator[Arrivals]:
        """Yields the arrivals of each model, in the order of `models`."""
        raise NotImplementedError

    def postprocess(self, trace: list[TraceRequest]) -> list[TraceRequest]:
        """Returns the ordered trace after the steps that need the requests of all models."""
        return trace


def generate(config: GeneratorConfig) -> list[TraceRequest]:
    """Returns a trace ordered by arrival, with default SLOs. Raises ConfigError.

    The same config gives the same trace.
    """
    config.check()
    trace: list[TraceRequest] = []
    for model, (moments_s, rng) in zip(config.models, config.arrivals(), strict=True):
        trace += requests_at(model, moments_s, config.lengths, rng)
    if not trace:
        raise ConfigError(f"rate: no request in {config.seconds:g} s; raise the rate or the time")
    trace.sort(key=lambda request: request.timestamp)
    return with_slos(config.postprocess(trace), Slo(), {})


def power_law(models: int, exponent: float) -> Floats:
    """Returns shares proportional to rank^-exponent, the largest first; their sum is 1."""
    weights = np.arange(1, models + 1, dtype=float) ** -exponent
    return np.asarray(weights / weights.sum())


def power_law_shares(models: int) -> Floats:
    """Returns power-law shares by which the last 60 % of the models get 25 % of the requests.

    Prism §3.1; interpolated where 60 % is not a whole number of models.
    """
    if models == 1:
        return np.ones(1)
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        heavy_tail = tail_share(power_law(models, middle)) > TAIL_REQUESTS
        low, high = (middle, high) if heavy_tail else (low, middle)
    return power_law(models, high)


def tail_share(shares: Floats) -> float:
    """Returns the fraction (0..1) of requests to the least popular TAIL_MODELS of the models."""
    ascending = np.sort(shares)
    cumulated = np.concatenate([[0.0], np.cumsum(ascending)]) / ascending.sum()
    return float(np.interp(TAIL_MODELS * len(shares), np.arange(len(shares) + 1), cumulated))


def check_one_each(config: GeneratorConfig) -> None:
    """Raises ConfigError if the rate gives fewer requests than there are models."""
    if round(config.rate_rps * config.seconds) < len(config.models):
        raise ConfigError(
            f"rate: {config.rate_rps:g} requests/s over {config.seconds:g} s are fewer requests "
            f"than the {len(config.models)} models; raise the rate or the time"
        )


def check_gap_cv(gap_cv: float) -> None:
    """Raises ConfigError if gaps would be too small or too large for floating point."""
    if not GAP_CV_MIN <= gap_cv <= GAP_CV_MAX:
        raise ConfigError(f"gap_cv: {gap_cv:g} must be between {GAP_CV_MIN:g} and {GAP_CV_MAX:g}")


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Returns requests per model, at least one each, with sum `total` (largest remainder)."""
    exact = np.asarray(shares) * (total - len(shares))
    counts = np.floor(exact).astype(int)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - len(shares) - int(counts.sum())]] += 1
    return [int(count) + 1 for count in counts]


def active_to_wall_s(busy_s: Floats, periods: Floats) -> Floats:
    """Converts times on a clock that runs only during `periods` to wall time.

    Args:
        busy_s: Sorted times since the first period's start, without the time between periods.
        periods: [period, (start, end)] in seconds of wall time.
    """
    before_s = np.concatenate([[0.0], np.cumsum(periods[:, 1] - periods[:, 0])])
    number = np.clip(np.searchsorted(before_s, busy_s, side="right") - 1, 0, len(periods) - 1)
    return np.asarray(periods[number, 0] + busy_s - before_s[number])
