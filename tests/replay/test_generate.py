"""The generator lands in the published ranges of Prism §3.1 and is seeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_replay.generators.base import (
    apportion,
    generate,
    power_law_shares,
    tail_share,
)
from prism_replay.generators.production import ProductionConfig, resolve_shares
from prism_replay.lengths import Lengths
from prism_replay.report.stats import coefficient_of_variation, describe
from prism_replay.slo import Slo, with_slos
from tests.replay.records import a_request

HOURS_4 = 4 * 3600.0


def many(models: int) -> tuple[str, ...]:
    return tuple(f"m{number}" for number in range(models))


@pytest.mark.parametrize("models", [2, 3, 4, 8, 24, 129])
def test_the_power_law_gives_a_quarter_to_sixty_percent_of_the_models(models: int) -> None:
    shares = power_law_shares(models)
    assert shares.sum() == pytest.approx(1)
    assert np.all(np.diff(shares) < 0)
    assert tail_share(shares) == pytest.approx(0.25, abs=1e-6)


def test_tail_share_on_known_values() -> None:
    assert tail_share(np.array([1.0, 1.0, 1.0, 1.0, 1.0])) == pytest.approx(0.6)
    assert tail_share(np.array([0.0, 0.0, 0.0, 5.0, 5.0])) == pytest.approx(0.0)
    # 60 % of 4 models: the two smallest and 0.4 of the next
    assert tail_share(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((1 + 2 + 0.4 * 3) / 10)


@pytest.mark.parametrize(("models", "seed"), [(24, 1), (24, 2), (16, 3), (48, 4)])
def test_a_generated_trace_has_the_published_statistics(models: int, seed: int) -> None:
    # 150 requests per model and hour: the tail stays below 100, as Prism's introduction reports
    config = ProductionConfig(many(models), HOURS_4, models / 24, seed)
    stats = describe(generate(config), HOURS_4)
    assert stats.tail_share == pytest.approx(0.25, abs=0.02)
    assert stats.rate_cv_above_1 >= 0.5
    assert stats.median_idle_above_30_s >= 0.5
    assert 0.23 <= stats.active_mean <= 0.50
    assert 54 <= stats.active_changes_per_hour <= 766
    assert np.mean([model.idle_per_hour > 10 for model in stats.models]) >= 0.4


def test_gaps_within_sessions_are_burstier_than_poisson() -> None:
    config = ProductionConfig(("a",), HOURS_4, 1.0, active_fraction=1.0, session_s=1e6)
    (model,) = describe(generate(config), HOURS_4).models
    assert model.gap_cv == pytest.approx(config.gap_cv, rel=0.1)


def test_the_seed_decides_everything() -> None:
    config = ProductionConfig(many(5), 600, 1.0, 7, prefix_share=0.3)
    assert generate(config) == generate(config)
    other = ProductionConfig(many(5), 600, 1.0, 8, prefix_share=0.3)
    assert generate(config) != generate(other)


@given(
    models=st.integers(1, 12),
    seconds=st.floats(1, 5000),
    rate=st.floats(0.01, 20),
    seed=st.integers(0, 9),
)
def test_traces_are_ordered_whole_and_inside_their_time(
    models: int, seconds: float, rate: float, seed: int
) -> None:
    config = ProductionConfig(many(models), seconds, min(rate, 2000 / seconds), seed)
    total = round(config.rate_rps * seconds)
    if total < models:
        with pytest.raises(ConfigError, match="fewer requests"):
            generate(config)
        return
    trace = generate(config)
    times = [request.arrival_s for request in trace]
    assert len(trace) == total
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= seconds + 0.001
    assert {request.model for request in trace} == set(config.models)


def test_shares_given_are_kept_and_the_rest_is_a_power_law() -> None:
    a, b, c = resolve_shares(("a", "b", "c"), {"b": 0.5})
    assert b == 0.5
    assert a + b + c == pytest.approx(1)
    assert a > c
    assert resolve_shares(("a", "b"), {"a": 0.1, "b": 0.3}) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(
    ("models", "shares"),
    [
        ("", {}),
        ("a", {"a": 0.0}),
        ("a", {"a": math.nan}),
        ("ab", {"a": 0.7, "b": 0.7}),
        ("ab", {"a": 1.0}),
    ],
)
def test_impossible_shares_are_errors(models: str, shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="models"):
        generate(ProductionConfig(tuple(models), 600, 1.0, shares=shares))


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": 0},
        {"rate_rps": -1},
        {"rate_rps": float("inf")},
        {"active_fraction": 0},
        {"gap_cv": 0},
        {"gap_cv": 1e200},
        {"rate_rps": 1e30},
        {"seconds": 1e30, "rate_rps": 1e-27},
        {"seed": -1},
    ],
)
def test_impossible_values_are_errors(fields: dict[str, object]) -> None:
    base: dict[str, object] = {"models": ("a",), "seconds": 60, "rate_rps": 1.0}
    with pytest.raises(ConfigError):
        generate(ProductionConfig(**(base | fields)))  # type: ignore[arg-type]


@given(total=st.integers(5, 500), weights=st.lists(st.integers(1, 99), min_size=1, max_size=5))
def test_apportioned_requests_sum_up(total: int, weights: list[int]) -> None:
    counts = apportion(total, [weight / sum(weights) for weight in weights])
    assert sum(counts) == total
    assert min(counts) >= 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= len(weights) + 1


def test_lengths_and_slos_are_as_asked() -> None:
    config = ProductionConfig(
        ("a", "b"),
        4000,
        1.0,
        shares={"a": 0.5, "b": 0.5},
        lengths=Lengths(input_median=50, input_max=200, output_median=20, output_max=60),
    )
    trace = with_slos(generate(config), Slo(1000, 100), {"b": Slo(500, 50)})
    inputs = [request.input_length for request in trace]
    assert max(inputs) == 200
    assert float(np.median(inputs)) == pytest.approx(50, rel=0.15)
    assert max(request.output_length for request in trace) == 60
    assert {(r.model, r.slo_ttft_ms, r.slo_tpot_ms) for r in trace} == {
        ("a", 1000, 100),
        ("b", 500, 50),
    }
    assert all(
        r.slo_e2e_ms == (r.slo_ttft_ms or 0) + (r.slo_tpot_ms or 0) * (r.output_length - 1)
        for r in trace
    )


def test_prefix_share_repeats_blocks_of_the_same_model_only() -> None:
    trace = generate(ProductionConfig(many(3), 1000, 1.0, prefix_share=0.5))
    users: dict[int, set[str]] = {}
    for request in trace:
        users.setdefault(request.hash_ids[0], set()).add(request.model)
    assert all(len(models) == 1 for models in users.values())
    assert len(users) == pytest.approx(500, abs=60)


def test_statistics_on_a_trace_counted_by_hand() -> None:
    trace = [a_request(t, "a") for t in (0.0, 5.0, 25.0, 65.0)] + [a_request(200.0, "b")]
    stats = describe(trace, 240.0)
    a, b = stats.models
    # gaps of a: 5, 20, 40, then 175 to the end
    assert (a.requests, a.share, a.median_idle_s) == (4, 0.8, 40.0)
    assert a.idle_per_hour == pytest.approx(3 / 240 * 3600)
    assert a.idle_time == pytest.approx((20 + 40 + 175) / 240)
    assert a.rate_cv == pytest.approx(np.std([3, 1, 0, 0]) / 1.0)
    assert (b.gap_cv, b.median_idle_s) == (None, 120.0)
    # samples at 120, 130 .. 240: a is active up to 185, b from 200 on
    assert stats.active_mean == pytest.approx((7 + 5) / (2 * 13))
    assert stats.active_changes_per_hour == pytest.approx(2 / 240 * 3600)


def test_coefficient_of_variation() -> None:
    assert coefficient_of_variation(np.array([2.0, 4.0])) == pytest.approx(1 / 3)
    assert coefficient_of_variation(np.array([2.0])) is None
    assert coefficient_of_variation(np.zeros(3)) is None
