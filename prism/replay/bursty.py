"""Bursty groups of models: traces with the statistics of the four production traces of Prism §3.1.

Models belong to groups that come and go together (an application, a time zone, a release). While
its group is there, a model's requests come in bursts with pauses of more than 10 s between them;
popular models have more and larger bursts. `generate.py` gives calmer traces with fewer pauses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism.replay.generate import Lengths, LengthSource, apportion, power_law_shares, requests_at
from prism.replay.slo import Slo, with_slos
from prism.replay.trace import TraceRequest

Floats = NDArray[np.float64]

PAUSE_MIN_S = 10.5
"""Between bursts; published idle intervals are those above 10 s."""


@dataclass(frozen=True)
class BurstyConfig:
    """What to generate.

    models: the most popular first; the last 60 % of them give 25 % of the requests. rate_rps: over
    all models and the whole time. groups: runs of equally popular models that come and go together.
    present_head, present_tail: parts of the time that the most and the least popular group is
    there, linear between; present_s: mean time for which it stays. pause_head_s, pause_tail_s: mean
    pause between bursts of the most and the least popular model, geometric between. pause_sigma: of
    the pauses' log-normal. burst_shape: of the Gamma that sizes bursts are drawn from, small for a
    few large ones among many small ones. gap_s: mean time between requests of a burst.
    """

    models: tuple[str, ...]
    seconds: float
    rate_rps: float
    seed: int = 0
    groups: int = 6
    present_head: float = 0.9
    present_tail: float = 0.1
    present_s: float = 900.0
    pause_head_s: float = 35.0
    pause_tail_s: float = 120.0
    pause_sigma: float = 0.7
    burst_shape: float = 0.5
    gap_s: float = 1.0
    lengths: LengthSource = field(default_factory=Lengths)
    slo: Slo = field(default_factory=Slo)


def generate_bursty(config: BurstyConfig) -> list[TraceRequest]:
    """A trace ordered by arrival. The same config gives the same trace. Raises ConfigError."""
    check(config)
    total = round(config.rate_rps * config.seconds)
    counts = apportion(total, [float(share) for share in power_law_shares(len(config.models))])
    group_of = np.arange(len(counts)) * min(config.groups, len(counts)) // len(counts)
    there = [presence(group, config) for group in range(int(group_of[-1]) + 1)]
    trace: list[TraceRequest] = []
    for rank, (model, count) in enumerate(zip(config.models, counts, strict=True)):
        rng = np.random.default_rng([config.seed, 1, rank])
        moments_s = arrivals(count, _along(rank, len(counts)), there[group_of[rank]], config, rng)
        trace += requests_at(model, moments_s, config.lengths, rng)
    trace.sort(key=lambda request: request.timestamp)
    return with_slos(trace, config.slo, {})


def check(config: BurstyConfig) -> None:
    """Raise ConfigError for values no trace can have."""
    positive = {
        "seconds": config.seconds,
        "rate": config.rate_rps,
        "groups": config.groups,
        "present_s": config.present_s,
        "burst_shape": config.burst_shape,
        "gap_s": config.gap_s,
    }
    for key, value in positive.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{key}: {value:g} must be above 0 and finite")
    if not config.models or round(config.rate_rps * config.seconds) < len(config.models):
        raise ConfigError("models and rate: give at least one model, and one request each")
    if not all(0 < part <= 1 for part in (config.present_head, config.present_tail)):
        raise ConfigError("present_head, present_tail: must be above 0 and at most 1")
    if min(config.pause_head_s, config.pause_tail_s) <= PAUSE_MIN_S or config.pause_sigma < 0:
        raise ConfigError(f"pauses: means must be above {PAUSE_MIN_S:g} s, their sigma not below 0")


def presence(group: int, config: BurstyConfig) -> Floats:
    """[period, (start, end)] in seconds for which the group is there, at least one."""
    rng = np.random.default_rng([config.seed, 0, group])
    groups = min(config.groups, len(config.models))
    share = np.interp(_along(group, groups), [0, 1], [config.present_head, config.present_tail])
    absent_s = config.present_s * (1 - share) / share
    clock_s = 0.0 if rng.random() < share else float(rng.exponential(absent_s))
    periods: list[tuple[float, float]] = []
    while clock_s < config.seconds:
        end_s = clock_s + float(rng.exponential(config.present_s))
        periods.append((clock_s, min(end_s, config.seconds)))
        clock_s = end_s + float(rng.exponential(absent_s))
    if not periods:
        start_s = float(rng.uniform(0, config.seconds))
        periods = [(start_s, min(start_s + config.present_s, config.seconds))]
    return np.array(periods)


def arrivals(
    count: int, along: float, there: Floats, config: BurstyConfig, rng: np.random.Generator
) -> Floats:
    """`count` sorted times (s): bursts laid along the periods of `there`."""
    lengths_s = there[:, 1] - there[:, 0]
    present_s = float(lengths_s.sum())
    pause_s = config.pause_head_s * (config.pause_tail_s / config.pause_head_s) ** along
    bursts = int(np.clip(round(present_s / pause_s), 1, count))
    starts_s = _lay(_pauses_s(bursts, pause_s, config.pause_sigma, rng), there, present_s)
    sizes = burst_sizes(count, bursts, config.burst_shape, rng)
    offsets_s = [np.cumsum(rng.exponential(config.gap_s, size)) for size in sizes]
    moments_s = np.concatenate([s + o for s, o in zip(starts_s, offsets_s, strict=True)])
    return np.sort(np.minimum(moments_s, config.seconds))


def burst_sizes(
    count: int, bursts: int, shape: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Requests of each burst, at least 1, `count` together."""
    weights = rng.gamma(shape, size=bursts) + 1e-9
    return 1 + rng.multinomial(count - bursts, weights / weights.sum())


def _pauses_s(bursts: int, mean_s: float, sigma: float, rng: np.random.Generator) -> Floats:
    """One more than bursts, each above PAUSE_MIN_S."""
    rest_s = mean_s - PAUSE_MIN_S
    drawn = rng.lognormal(math.log(rest_s) - sigma**2 / 2, sigma, bursts + 1)
    return np.asarray(PAUSE_MIN_S + drawn)


def _lay(pauses_s: Floats, there: Floats, present_s: float) -> Floats:
    """Times of the bursts when the time between them counts only while the group is there."""
    busy_s = np.cumsum(pauses_s)[:-1] * (present_s / pauses_s.sum())
    before_s = np.concatenate([[0.0], np.cumsum(there[:, 1] - there[:, 0])])
    period = np.clip(np.searchsorted(before_s, busy_s, side="right") - 1, 0, len(there) - 1)
    return np.asarray(there[period, 0] + busy_s - before_s[period])


def _along(rank: int, size: int) -> float:
    """0 for the first of `size`, 1 for the last."""
    return rank / (size - 1) if size > 1 else 0.0


def numbered(models: int) -> tuple[str, ...]:
    """model-0 and so on, the most popular first."""
    return tuple(f"model-{rank}" for rank in range(models))


PRESETS: dict[str, BurstyConfig] = {
    "hyperbolic": BurstyConfig(
        numbered(24),
        seconds=3600.0,
        rate_rps=2.0,
        groups=12,
        present_head=0.8,
        present_tail=0.05,
        pause_head_s=26.0,
        pause_tail_s=70.0,
    ),
    "novita": BurstyConfig(
        numbered(16),
        seconds=3600.0,
        rate_rps=0.5,
        groups=8,
        present_head=0.8,
        present_tail=0.04,
        pause_head_s=35.0,
        pause_tail_s=60.0,
    ),
    "arena-battle": BurstyConfig(
        numbered(129),
        seconds=3600.0,
        rate_rps=1.0,
        groups=43,
        present_head=0.62,
        present_tail=0.1,
        present_s=3600.0,
        pause_head_s=85.0,
        pause_tail_s=90.0,
        pause_sigma=0.2,
        burst_shape=1.0,
    ),
    "arena-chat": BurstyConfig(
        numbered(84),
        seconds=3600.0,
        rate_rps=1.0,
        groups=28,
        present_head=0.8,
        present_tail=0.1,
        present_s=1200.0,
        pause_head_s=60.0,
        pause_tail_s=220.0,
    ),
}
"""The traces of Prism's Table 2; rates are assumed, they are not published."""


def preset(name: str, seconds: float, seed: int = 0) -> BurstyConfig:
    """One of PRESETS at this length. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r}: known are {', '.join(PRESETS)}")
    return replace(PRESETS[name], seconds=seconds, seed=seed)
