"""Seeded synthetic multi-model traces, calibrated to the published statistics of Prism §3.1.

Popularity is a power law; each model alternates between sessions with traffic and idle periods
so that only part of the models is active at a time; within a session gaps are Gamma distributed
with a coefficient of variation above 1. `stats.describe` measures what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism.replay.slo import Slo, with_slos
from prism.replay.trace import TraceRequest

Floats = NDArray[np.float64]

TAIL_MODELS = 0.6
TAIL_REQUESTS = 0.25


class LengthSource(Protocol):
    """Where the lengths of generated requests come from."""

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """`count` times (input, output) tokens, each at least 1."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts, clipped to [1, max]. The defaults have, clipped, the medians and
    means of the public Chatbot Arena sample: 40 and 136 tokens in, 211 and 256 out."""

    input_median: float = 40.0
    input_sigma: float = 1.78
    input_max: int = 1024
    output_median: float = 211.0
    output_sigma: float = 0.62
    output_max: int = 1024

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        inputs = _tokens(self.input_median, self.input_sigma, self.input_max, count, rng)
        outputs = _tokens(self.output_median, self.output_sigma, self.output_max, count, rng)
        return list(zip(inputs, outputs, strict=True))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Pairs of (input, output) tokens seen somewhere, drawn with replacement."""

    pairs: tuple[tuple[int, int], ...]

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        return [self.pairs[index] for index in rng.integers(len(self.pairs), size=count)]


@dataclass(frozen=True)
class GeneratorConfig:
    """What to generate.

    shares: model -> share of the requests, or None to take it from the power law; the order is
    the order of popularity. rate_rps: requests per second over all models and the whole time.
    active_fraction: mean part of the time that a model is within `active_window_s` of a session;
    what `stats` then finds active is lower, since sessions hold gaps and models few requests.
    gap_cv: coefficient of variation of the gaps within a session. session_s: mean length of a
    session. prefix_share: part of the requests that repeat an earlier prompt's first block.
    """

    shares: dict[str, float | None]
    seconds: float
    rate_rps: float
    seed: int = 0
    active_fraction: float = 0.5
    active_window_s: float = 120.0
    gap_cv: float = 2.5
    session_s: float = 300.0
    prefix_share: float = 0.0
    lengths: LengthSource = field(default_factory=Lengths)
    slo: Slo = field(default_factory=Slo)
    model_slos: dict[str, Slo] = field(default_factory=dict)


def generate(config: GeneratorConfig) -> list[TraceRequest]:
    """A trace ordered by arrival. The same config gives the same trace. Raises ConfigError."""
    check(config)
    shares = resolve_shares(config.shares)
    total = round(config.rate_rps * config.seconds)
    counts = apportion(total, list(shares.values()))
    targets = active_targets(len(counts), config.active_fraction)
    trace: list[TraceRequest] = []
    for rank, (model, count) in enumerate(zip(shares, counts, strict=True)):
        rng = np.random.default_rng([config.seed, rank])
        moments_s = arrivals(count, targets[rank], config, rng)
        trace += requests_at(model, moments_s, config.lengths, rng)
    trace.sort(key=lambda request: request.timestamp)
    trace = _share_prefixes(trace, config)
    return with_slos(trace, config.slo, config.model_slos)


def check(config: GeneratorConfig) -> None:
    """Raise ConfigError for values no trace can have."""
    if not config.shares:
        raise ConfigError("models: name at least one")
    if not (0 < config.seconds < math.inf and 0 < config.rate_rps < math.inf):
        raise ConfigError("seconds and rate: must be above 0")
    if round(config.rate_rps * config.seconds) < len(config.shares):
        raise ConfigError(
            f"rate: {config.rate_rps:g} requests/s over {config.seconds:g} s are fewer requests "
            f"than the {len(config.shares)} models; raise --rate or --seconds"
        )
    if not 0 < config.active_fraction <= 1:
        raise ConfigError("active fraction: must be above 0 and at most 1")
    if config.gap_cv <= 0 or config.session_s <= 0:
        raise ConfigError("gap CV and session length: must be above 0")
    unknown = set(config.model_slos) - set(config.shares)
    if unknown:
        raise ConfigError(f"SLO for {', '.join(sorted(unknown))}: not among the models")


def power_law_shares(models: int) -> Floats:
    """Shares rank^-a, popular first, with `a` such that the last 60 % of the models give 25 %
    of the requests (Prism §3.1; interpolated where 60 % is no whole number of models)."""
    if models == 1:
        return np.ones(1)
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        heavy_tail = tail_share(power_law(models, middle)) > TAIL_REQUESTS
        low, high = (middle, high) if heavy_tail else (low, middle)
    return power_law(models, high)


def power_law(models: int, exponent: float) -> Floats:
    """Shares rank^-exponent, popular first, summing up to 1."""
    weights = np.arange(1, models + 1, dtype=float) ** -exponent
    return np.asarray(weights / weights.sum())


def tail_share(shares: Floats, tail_models: float = TAIL_MODELS) -> float:
    """Part of all requests that the least popular `tail_models` of the models give (0..1)."""
    ascending = np.sort(shares)
    cumulated = np.concatenate([[0.0], np.cumsum(ascending)]) / ascending.sum()
    return float(np.interp(tail_models * len(shares), np.arange(len(shares) + 1), cumulated))


def resolve_shares(shares: dict[str, float | None]) -> dict[str, float]:
    """Fill in the shares left open: the rest, split by the power law. Raises ConfigError."""
    fixed = {name: share for name, share in shares.items() if share is not None}
    rest = 1.0 - sum(fixed.values())
    open_names = [name for name in shares if name not in fixed]
    if any(share <= 0 for share in fixed.values()) or rest < -1e-9:
        raise ConfigError("models: shares must be above 0 and sum up to at most 1")
    if not open_names:
        return {name: share / sum(fixed.values()) for name, share in fixed.items()}
    if rest <= 0:
        raise ConfigError(f"models: nothing is left for {', '.join(open_names)}; lower the shares")
    parts = power_law_shares(len(open_names)) * rest
    filled = dict(zip(open_names, (float(part) for part in parts), strict=True))
    return {name: fixed.get(name) or filled[name] for name in shares}


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Whole requests per model, at least one each, summing up to `total` (largest remainder)."""
    exact = np.asarray(shares) * (total - len(shares))
    counts = np.floor(exact).astype(int)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - len(shares) - int(counts.sum())]] += 1
    return [int(count) + 1 for count in counts]


def active_targets(models: int, mean: float) -> Floats:
    """Part of the time each model is to be active, popular first: a line around `mean`."""
    slope = min(mean - 0.02, 1.0 - mean, 0.33)
    return np.linspace(mean + slope, mean - slope, models) if models > 1 else np.array([mean])


def arrivals(
    count: int, active: float, config: GeneratorConfig, rng: np.random.Generator
) -> Floats:
    """`count` sorted arrival times (s): Gamma gaps laid along the model's sessions."""
    starts_s, ends_s = sessions(count, active, config, rng)
    shape = 1.0 / config.gap_cv**2
    gaps = rng.gamma(shape, size=count + 1) + 1e-12
    lengths_s = ends_s - starts_s
    busy_s = np.cumsum(gaps)[:-1] / gaps.sum() * lengths_s.sum()
    before_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    session = np.clip(np.searchsorted(before_s, busy_s, side="right") - 1, 0, len(lengths_s) - 1)
    return np.asarray(starts_s[session] + busy_s - before_s[session])


def sessions(
    count: int, active: float, config: GeneratorConfig, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Starts and ends (s) of the periods with traffic, at least one, within [0, seconds].

    A model counts as active for `active_window_s` after a session as well; a model with few
    requests gets few sessions, so that each still holds several requests.
    """
    cycle_s = max(_cycle_s(active, config), 4.0 * config.seconds / count)
    session_s = max(0.05 * cycle_s, active * cycle_s - config.active_window_s)
    session_s = min(session_s, config.session_s) if session_s < cycle_s else config.session_s
    idle_s = max(cycle_s - session_s, 0.0)
    clock_s = -rng.uniform(0, cycle_s)
    periods: list[tuple[float, float]] = []
    while clock_s < config.seconds:
        end_s = clock_s + rng.exponential(session_s)
        if end_s > 0:
            periods.append((max(0.0, clock_s), min(end_s, config.seconds)))
        clock_s = end_s + rng.exponential(idle_s)
    if not periods:
        start_s = rng.uniform(0, max(config.seconds - session_s, 0.0))
        periods = [(start_s, min(start_s + session_s, config.seconds))]
    starts_s, ends_s = zip(*periods, strict=True)
    return np.array(starts_s), np.array(ends_s)


def _cycle_s(active: float, config: GeneratorConfig) -> float:
    """Mean length of session plus idle period for which the model is active `active` of it."""
    return (config.session_s + config.active_window_s) / active


def requests_at(
    model: str, moments_s: Floats, lengths: LengthSource, rng: np.random.Generator
) -> list[TraceRequest]:
    """One request at each of `moments_s`, its lengths drawn from `lengths`."""
    drawn = lengths.sample(len(moments_s), rng)
    return [
        TraceRequest(timestamp=round(moment * 1000), model=model, input_length=i, output_length=o)
        for moment, (i, o) in zip(moments_s.tolist(), drawn, strict=True)
    ]


def _tokens(
    median: float, sigma: float, most: int, size: int, rng: np.random.Generator
) -> list[int]:
    drawn = rng.lognormal(math.log(median), sigma, size)
    return [int(tokens) for tokens in np.clip(np.rint(drawn), 1, most)]


def _share_prefixes(trace: list[TraceRequest], config: GeneratorConfig) -> list[TraceRequest]:
    """Give each request a first block of its own or, with `prefix_share`, one seen before."""
    if not config.prefix_share:
        return trace
    rng = np.random.default_rng([config.seed, len(config.shares)])
    seen: dict[str, list[int]] = {}
    shared = []
    for number, request in enumerate(trace):
        blocks = seen.setdefault(request.model, [])
        repeat = blocks and rng.random() < config.prefix_share
        block = blocks[int(rng.integers(len(blocks)))] if repeat else number
        blocks.append(block)
        shared.append(msgspec.structs.replace(request, hash_ids=(block,)))
    return shared
