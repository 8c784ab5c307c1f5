"""Production traffic in sessions, calibrated to the published statistics of Prism §3.1.

Popularity is a power law. Each model alternates between sessions with traffic and idle periods, so
that only some of the models are active at a time. Gaps within a session are Gamma distributed with
a coefficient of variation above 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np

from prism.errors import ConfigError
from prism_replay.generators.base import (
    Arrivals,
    GeneratorConfig,
    active_to_wall_s,
    apportion,
    check_gap_cv,
    check_one_each,
    power_law_shares,
)
from prism_replay.lengths import Floats
from prism_replay.trace import TraceRequest


@dataclass(frozen=True)
class ProductionConfig(GeneratorConfig):
    """Settings of `--kind production`."""

    shares: Mapping[str, float] = field(default_factory=dict)
    """Model -> its fraction of the requests. The power law distributes the rest."""
    active_fraction: float = 0.5
    """Mean fraction of the time that a model is in a session or `active_window_s` after one.
    `stats` measures less, since sessions contain gaps and unpopular models have few requests."""
    active_window_s: float = 120.0
    """Time after a session in which a model still counts as active."""
    gap_cv: float = 2.5
    """Coefficient of variation of the gaps within a session."""
    session_s: float = 300.0
    """Mean length of a session."""
    prefix_share: float = 0.0
    """Fraction of the requests that repeat the first block of an earlier prompt."""

    POSITIVE: ClassVar[tuple[str, ...]] = ("seconds", "rate_rps", "gap_cv", "session_s")

    def check(self) -> None:
        super().check()
        check_one_each(self)
        if not 0 < self.active_fraction <= 1:
            raise ConfigError("active_fraction: must be > 0 and <= 1")
        check_gap_cv(self.gap_cv)

    def arrivals(self) -> Iterator[Arrivals]:
        total = round(self.rate_rps * self.seconds)
        counts = apportion(total, resolve_shares(self.models, self.shares))
        targets = active_targets(len(counts), self.active_fraction)
        for rank, count in enumerate(counts):
            rng = np.random.default_rng([self.seed, rank])
            yield session_arrivals(count, targets[rank], self, rng), rng

    def postprocess(self, trace: list[TraceRequest]) -> list[TraceRequest]:
        """Returns the trace with a first block per request: new, or by `prefix_share` repeated."""
        if not self.prefix_share:
            return trace
        rng = np.random.default_rng([self.seed, len(self.models)])
        seen: dict[str, list[int]] = {}
        shared = []
        for number, request in enumerate(trace):
            blocks = seen.setdefault(request.model, [])
            repeat = blocks and rng.random() < self.prefix_share
            block = blocks[int(rng.integers(len(blocks)))] if repeat else number
            blocks.append(block)
            shared.append(msgspec.structs.replace(request, hash_ids=(block,)))
        return shared


def resolve_shares(models: tuple[str, ...], fixed: Mapping[str, float]) -> list[float]:
    """Returns each model's share. Models without a fixed share get the rest by the power law.

    Raises ConfigError.
    """
    rest = 1.0 - sum(fixed.values())
    left = [name for name in models if name not in fixed]
    if not all(share > 0 for share in fixed.values()) or rest < -1e-9:
        raise ConfigError("models: shares must be > 0 and their sum <= 1")
    if not left:
        return [fixed[name] / sum(fixed.values()) for name in models]
    if rest <= 0:
        raise ConfigError(
            f"models: the fixed shares leave nothing for {', '.join(left)}; lower them"
        )
    parts = dict(zip(left, (power_law_shares(len(left)) * rest).tolist(), strict=True))
    return [fixed.get(name) or parts[name] for name in models]


def active_targets(models: int, mean: float) -> Floats:
    """Returns each model's target fraction of active time, falling linearly around `mean`."""
    slope = min(mean - 0.02, 1.0 - mean, 0.33)
    return np.linspace(mean + slope, mean - slope, models) if models > 1 else np.array([mean])


def session_arrivals(
    count: int, active: float, config: ProductionConfig, rng: np.random.Generator
) -> Floats:
    """Returns `count` sorted arrival times (s), with Gamma gaps within the model's sessions."""
    periods = sessions(count, active, config, rng)
    gaps = rng.gamma(1.0 / config.gap_cv**2, size=count + 1) + 1e-12
    busy_s = np.cumsum(gaps)[:-1] / gaps.sum() * (periods[:, 1] - periods[:, 0]).sum()
    return active_to_wall_s(busy_s, periods)


def sessions(
    count: int, active: float, config: ProductionConfig, rng: np.random.Generator
) -> Floats:
    """Returns a model's sessions, at least one, within [0, seconds].

    [session, (start, end)] in seconds. A model with few requests gets few sessions, so that each
    still contains several requests.
    """
    cycle_s = (config.session_s + config.active_window_s) / active
    cycle_s = max(cycle_s, 4.0 * config.seconds / count)
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
    return np.array(periods)
