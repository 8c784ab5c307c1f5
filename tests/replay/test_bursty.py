"""Generated traces of bursty groups lie where the four production traces of Prism §3.1 do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_replay.generators.base import generate
from prism_replay.generators.bursty import (
    PAUSE_MIN_S,
    PRESETS,
    BurstyConfig,
    burst_sizes,
    presence,
)
from prism_replay.generators.kinds import config_of_preset
from prism_replay.report.stats import TraceStats, by_model, describe

HOURS_8 = 8 * 3600.0
SMALL = BurstyConfig(("a", "b", "c"), 1800.0, 0.5)


def preset(name: str, seconds: float, seed: int = 0) -> BurstyConfig:
    return config_of_preset(name, None, {"seconds": seconds, "seed": seed})


def stats_of(name: str, seed: int, seconds: float = HOURS_8) -> TraceStats:
    return describe(generate(preset(name, seconds, seed)), seconds)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_what_is_published_of_all_traces(name: str, seed: int) -> None:
    stats = stats_of(name, seed)
    assert stats.tail_share == pytest.approx(0.25, abs=0.02)
    assert 0.23 <= stats.active_mean <= 0.50
    assert 54 * 0.9 <= stats.active_changes_per_hour <= 766
    assert stats.median_idle_above_30_s >= 0.5
    assert stats.rate_cv_above_half >= 0.5


@pytest.mark.parametrize("name", ["hyperbolic", "novita"])
def test_half_of_the_models_of_the_two_providers_pause_often(name: str) -> None:
    stats = stats_of(name, 3)
    assert 0.35 <= stats.idle_per_hour_above_40 <= 0.65
    assert max(model.idle_per_hour for model in stats.models) <= 160
    assert stats.rate_cv_above_1 >= 0.5


@pytest.mark.parametrize("name", ["arena-battle", "arena-chat"])
def test_most_models_of_the_arenas_have_long_pauses(name: str) -> None:
    assert stats_of(name, 3).median_idle_above_80_s > 0.5


def test_novitas_models_are_idle_most_of_the_time_and_changes_are_few() -> None:
    novita, chat = stats_of("novita", 2), stats_of("arena-chat", 2)
    assert novita.idle_time_above_70 == 1.0
    assert novita.active_changes_per_hour < 80
    assert chat.active_changes_per_hour > 600


def test_days_are_not_alike() -> None:
    config = replace(preset("hyperbolic", 3 * 86400.0, 1), rate_rps=0.2)
    stats = describe(generate(config), config.seconds)
    assert stats.day_correlation is not None
    assert abs(stats.day_correlation) < 0.15


def test_members_of_a_group_come_and_go_together() -> None:
    config = replace(SMALL, seconds=6 * 3600.0, groups=1, present_head=0.3, gap_s=0.001)
    there = presence(0, config)
    assert 0.1 < float((there[:, 1] - there[:, 0]).sum()) / config.seconds < 0.6
    for requests in by_model(generate(config)).values():
        for request in requests:
            inside = (there[:, 0] <= request.arrival_s) & (request.arrival_s <= there[:, 1] + 60)
            assert inside.any()


def test_the_seed_decides_everything() -> None:
    assert generate(SMALL) == generate(SMALL)
    assert generate(SMALL) != generate(replace(SMALL, seed=1))


@given(
    models=st.integers(1, 9),
    seconds=st.floats(60, 4000),
    groups=st.integers(1, 12),
    present=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    seed=st.integers(0, 5),
)
def test_traces_are_ordered_whole_and_inside_their_time(
    models: int, seconds: float, groups: int, present: tuple[float, float], seed: int
) -> None:
    names = tuple(f"m{rank}" for rank in range(models))
    config = BurstyConfig(
        names,
        seconds,
        0.5,
        seed,
        groups=groups,
        present_head=present[0],
        present_tail=present[1],
    )
    trace = generate(config)
    times = [request.arrival_s for request in trace]
    assert len(trace) == round(0.5 * seconds)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= seconds + 0.001
    assert {request.model for request in trace} == set(names)


@given(count=st.integers(1, 200), seed=st.integers(0, 99), part=st.floats(0.01, 1))
def test_bursts_hold_all_requests(count: int, seed: int, part: float) -> None:
    bursts = max(1, int(count * part))
    sizes = burst_sizes(count, bursts, 0.5, np.random.default_rng(seed))
    assert (len(sizes), int(sizes.sum())) == (bursts, count)
    assert int(sizes.min()) >= 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": 0.0}, "seconds"),
        ({"rate_rps": float("nan")}, "rate"),
        ({"rate_rps": 1e-5}, "fewer requests than the 3 models"),
        ({"models": ()}, "at least one model"),
        ({"groups": 0}, "groups"),
        ({"present_head": 0.0}, "present_head"),
        ({"present_tail": 1.1}, "present_tail"),
        ({"pause_head_s": PAUSE_MIN_S}, "pauses"),
        ({"pause_sigma": -1.0}, "pauses"),
        ({"burst_shape": 0.0}, "burst_shape"),
    ],
)
def test_impossible_values_are_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate(replace(SMALL, **change))  # type: ignore[arg-type]


def test_unknown_presets_list_the_known() -> None:
    with pytest.raises(ConfigError, match="preset 'x' is not one of hyperbolic"):
        preset("x", 60.0)
