"""Steady traffic with skewed popularity: MuxServe's synthetic workloads (§4.1).

Rates are proportional to rank^-alpha. Each model's requests are a Poisson process or, with a
`gap_cv` other than 1, have Gamma gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from prism.errors import ConfigError
from prism_replay.generators.base import Arrivals, GeneratorConfig, check_gap_cv, power_law
from prism_replay.lengths import SHAREGPT, Floats, LengthSource

ALPHA_MAX = 50.0
"""Largest alpha: above it, the last models' rates are too small for floating point."""


@dataclass(frozen=True)
class SteadyConfig(GeneratorConfig):
    """Settings of `--kind steady`."""

    lengths: LengthSource = SHAREGPT
    alpha: float = 0.9
    """Skew of popularity, 0 for equal rates. The first 20 % of the models get 50 % of the requests
    at 0.9, and 90 % at 2.1 (MuxServe, Figure 6)."""
    gap_cv: float = 1.0
    """Coefficient of variation of the gaps, 1 for Poisson."""

    POSITIVE: ClassVar[tuple[str, ...]] = ("seconds", "rate_rps", "gap_cv")

    def check(self) -> None:
        super().check()
        if not 0 <= self.alpha <= ALPHA_MAX:
            raise ConfigError(f"alpha: {self.alpha:g} must be between 0 and {ALPHA_MAX:g}")
        check_gap_cv(self.gap_cv)

    def arrivals(self) -> Iterator[Arrivals]:
        rates_rps = self.rate_rps * power_law(len(self.models), self.alpha)
        for rank, rate_rps in enumerate(rates_rps.tolist()):
            rng = np.random.default_rng([self.seed, 2, rank])
            yield renewals(rate_rps, self.gap_cv, self.seconds, rng), rng


def renewals(rate_rps: float, gap_cv: float, seconds: float, rng: np.random.Generator) -> Floats:
    """Returns sorted times (s) in [0, seconds) with independent Gamma gaps.

    The first gap is drawn from the same distribution: a model's first request is not at time 0.
    """
    shape = 1.0 / gap_cv**2
    size = int(rate_rps * seconds + 6 * gap_cv * math.sqrt(rate_rps * seconds) + 10)
    times_s = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate_rps), size))
    while times_s[-1] < seconds:
        more_s = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate_rps), size))
        times_s = np.concatenate([times_s, times_s[-1] + more_s])
    return np.asarray(times_s[times_s < seconds])
