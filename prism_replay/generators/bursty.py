"""Bursty groups of models: traces with the statistics of the four production traces of Prism §3.1.

Models belong to groups that become active together (an application, a time zone, a release). While
its group is present, a model's requests come in bursts with pauses of more than 10 s between them.
Popular models have more and larger bursts. Traces of `production.py` have fewer pauses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism_replay.generators.base import (
    Arrivals,
    GeneratorConfig,
    active_to_wall_s,
    apportion,
    check_one_each,
    power_law_shares,
)
from prism_replay.lengths import Floats

PAUSE_MIN_S = 10.5
"""Shortest pause between bursts; the published idle intervals are those above 10 s."""


@dataclass(frozen=True)
class BurstyConfig(GeneratorConfig):
    """Settings of `--kind bursty`. The last 60 % of the models get 25 % of the requests."""

    groups: int = 6
    """Number of groups of models with similar popularity that become active together."""
    present_head: float = 0.9
    """Fraction of the time that the most popular group is present."""
    present_tail: float = 0.1
    """Fraction of the time that the least popular group is present; linear in between."""
    present_s: float = 900.0
    """Mean duration of a group's presence."""
    pause_head_s: float = 35.0
    """Mean pause between bursts of the most popular model."""
    pause_tail_s: float = 120.0
    """Mean pause between bursts of the least popular model; geometric in between."""
    pause_sigma: float = 0.7
    """Sigma of the log-normal distribution of pauses."""
    burst_shape: float = 0.5
    """Shape of the Gamma distribution of burst sizes; the smaller, the more unequal."""
    gap_s: float = 1.0
    """Mean time between requests of a burst."""

    POSITIVE: ClassVar[tuple[str, ...]] = (
        "seconds",
        "rate_rps",
        "groups",
        "present_s",
        "burst_shape",
        "gap_s",
    )

    def check(self) -> None:
        super().check()
        check_one_each(self)
        if not all(0 < value <= 1 for value in (self.present_head, self.present_tail)):
            raise ConfigError("present_head, present_tail: must be > 0 and <= 1")
        if min(self.pause_head_s, self.pause_tail_s) <= PAUSE_MIN_S or self.pause_sigma < 0:
            raise ConfigError(f"pauses: means must be > {PAUSE_MIN_S:g} s, their sigma >= 0")

    def arrivals(self) -> Iterator[Arrivals]:
        models = len(self.models)
        total = round(self.rate_rps * self.seconds)
        counts = apportion(total, power_law_shares(models).tolist())
        group_of = np.arange(models) * min(self.groups, models) // models
        present = [presence(group, self) for group in range(int(group_of[-1]) + 1)]
        for rank, count in enumerate(counts):
            rng = np.random.default_rng([self.seed, 1, rank])
            place = _relative_rank(rank, models)
            yield bursty_arrivals(count, place, present[group_of[rank]], self, rng), rng


def presence(group: int, config: BurstyConfig) -> Floats:
    """Returns the periods in which the group is present, at least one.

    [period, (start, end)] in seconds.
    """
    rng = np.random.default_rng([config.seed, 0, group])
    groups = min(config.groups, len(config.models))
    ends = [config.present_head, config.present_tail]
    share = np.interp(_relative_rank(group, groups), [0, 1], ends)
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


def bursty_arrivals(
    count: int, place: float, present: Floats, config: BurstyConfig, rng: np.random.Generator
) -> Floats:
    """Returns `count` sorted arrival times (s), in bursts during the periods of `present`.

    Args:
        place: Popularity rank of the model, from 0 (most popular) to 1.
    """
    present_s = float((present[:, 1] - present[:, 0]).sum())
    pause_s = config.pause_head_s * (config.pause_tail_s / config.pause_head_s) ** place
    bursts = int(np.clip(round(present_s / pause_s), 1, count))
    pauses_s = _pauses_s(bursts, pause_s, config.pause_sigma, rng)
    starts_s = active_to_wall_s(np.cumsum(pauses_s)[:-1] * (present_s / pauses_s.sum()), present)
    sizes = burst_sizes(count, bursts, config.burst_shape, rng)
    offsets_s = [np.cumsum(rng.exponential(config.gap_s, size)) for size in sizes]
    moments_s = np.concatenate([s + o for s, o in zip(starts_s, offsets_s, strict=True)])
    return np.sort(np.minimum(moments_s, config.seconds))


def burst_sizes(
    count: int, bursts: int, shape: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Returns the number of requests of each burst, at least 1, with sum `count`."""
    weights = rng.gamma(shape, size=bursts) + 1e-9
    return 1 + rng.multinomial(count - bursts, weights / weights.sum())


def _pauses_s(bursts: int, mean_s: float, sigma: float, rng: np.random.Generator) -> Floats:
    """Returns `bursts` + 1 pauses, each above PAUSE_MIN_S."""
    rest_s = mean_s - PAUSE_MIN_S
    drawn = rng.lognormal(math.log(rest_s) - sigma**2 / 2, sigma, bursts + 1)
    return np.asarray(PAUSE_MIN_S + drawn)


def _relative_rank(rank: int, size: int) -> float:
    """Returns 0 for the first of `size` ranks, 1 for the last."""
    return rank / (size - 1) if size > 1 else 0.0


def numbered(models: int) -> tuple[str, ...]:
    """Returns the names model-0, model-1 and so on, the most popular first."""
    return tuple(f"model-{rank}" for rank in range(models))


def _preset(models: int, **settings: Any) -> BurstyConfig:
    return BurstyConfig(numbered(models), **settings)


_PRESETS = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())
PRESETS: dict[str, BurstyConfig] = {name: _preset(**each) for name, each in _PRESETS.items()}
"""The traces of Prism's Table 2."""
