"""Steady traffic with skewed popularity: MuxServe's synthetic workloads (§4.1).

Rates fall with rank^-alpha; each model's requests come as a Poisson process, or with Gamma gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism.replay.generate import Lengths, LengthSource, power_law, requests_at
from prism.replay.slo import Slo, with_slos
from prism.replay.trace import TraceRequest

Floats = NDArray[np.float64]

SHAREGPT = Lengths(
    input_median=69,
    input_sigma=1.3,
    input_max=2048,
    output_median=207,
    output_sigma=1.0,
    output_max=2048,
)
"""Log-normals with the means that MuxServe reports of ShareGPT: 161 tokens in, 338 out."""


@dataclass(frozen=True)
class SteadyConfig:
    """What to generate.

    models: the most popular first. alpha: 0 for equal rates; at 0.9 the first 20 % of the models
    get 50 % of the requests, at 2.1 90 % (MuxServe, Figure 6). rate_rps: of all models. gap_cv:
    coefficient of variation of the gaps, 1 for Poisson.
    """

    models: tuple[str, ...]
    seconds: float
    rate_rps: float
    alpha: float = 0.9
    gap_cv: float = 1.0
    seed: int = 0
    lengths: LengthSource = field(default=SHAREGPT)
    slo: Slo = field(default_factory=Slo)


def generate_steady(config: SteadyConfig) -> list[TraceRequest]:
    """A trace ordered by arrival. The same config gives the same trace. Raises ConfigError."""
    check(config)
    rates_rps = config.rate_rps * power_law(len(config.models), config.alpha)
    trace: list[TraceRequest] = []
    for rank, (model, rate_rps) in enumerate(zip(config.models, rates_rps, strict=True)):
        rng = np.random.default_rng([config.seed, 2, rank])
        moments_s = renewals(float(rate_rps), config.gap_cv, config.seconds, rng)
        trace += requests_at(model, moments_s, config.lengths, rng)
    if not trace:
        raise ConfigError(f"rate: no request in {config.seconds:g} s; raise the rate or the time")
    trace.sort(key=lambda request: request.timestamp)
    return with_slos(trace, config.slo, {})


def check(config: SteadyConfig) -> None:
    """Raise ConfigError for values no trace can have."""
    for key, value in (
        ("seconds", config.seconds),
        ("rate", config.rate_rps),
        ("gap_cv", config.gap_cv),
    ):
        if not 0 < value < math.inf:
            raise ConfigError(f"{key}: {value:g} must be above 0 and finite")
    if not config.models or not 0 <= config.alpha < math.inf:
        raise ConfigError("models, alpha: give at least one model, alpha not below 0")


def renewals(rate_rps: float, gap_cv: float, seconds: float, rng: np.random.Generator) -> Floats:
    """Sorted times (s) in [0, seconds) with independent Gamma gaps. The first gap is drawn from
    the same distribution, so a model's first request comes late rather than at once."""
    shape = 1.0 / gap_cv**2
    size = int(rate_rps * seconds + 6 * gap_cv * math.sqrt(rate_rps * seconds) + 10)
    times_s = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate_rps), size))
    while times_s[-1] < seconds:
        more_s = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate_rps), size))
        times_s = np.concatenate([times_s, times_s[-1] + more_s])
    return np.asarray(times_s[times_s < seconds])
