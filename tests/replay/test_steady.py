"""MuxServe's synthetic workloads: skew, Poisson and Gamma gaps, ShareGPT's lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prism.errors import ConfigError
from prism_replay.generators.base import generate, power_law
from prism_replay.generators.steady import SteadyConfig
from prism_replay.lengths import EmpiricalLengths
from prism_replay.report.stats import describe

NAMES = tuple(f"m{rank}" for rank in range(20))
BASE = SteadyConfig(NAMES, 3600.0, 10.0)


@pytest.mark.parametrize(("alpha", "share"), [(0.9, 0.5), (2.1, 0.9)])
def test_the_first_fifth_gets_what_muxserve_says(alpha: float, share: float) -> None:
    # Figure 6: 20 % of the LLMs receive 50 % and 90 % of the requests
    assert float(power_law(20, alpha)[:4].sum()) == pytest.approx(share, abs=0.08)


def test_rates_and_popularity_are_as_asked() -> None:
    stats = describe(generate(BASE), 3600.0)
    assert stats.requests == pytest.approx(36_000, rel=0.03)
    assert [model.model for model in stats.models[:3]] == ["m0", "m1", "m2"]
    assert stats.models[0].share == pytest.approx(float(power_law(20, 0.9)[0]), rel=0.1)


@pytest.mark.parametrize("gap_cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_coefficient_of_variation_asked_for(gap_cv: float) -> None:
    trace = generate(replace(BASE, models=("a",), gap_cv=gap_cv))
    assert describe(trace).models[0].gap_cv == pytest.approx(gap_cv, rel=0.1)


def test_lengths_have_sharegpts_means() -> None:
    trace = generate(BASE)
    assert np.mean([r.input_length for r in trace]) == pytest.approx(161, rel=0.08)
    assert np.mean([r.output_length for r in trace]) == pytest.approx(338, rel=0.08)


def test_lengths_can_be_pairs_seen_elsewhere() -> None:
    pairs = ((3, 4), (500, 6))
    trace = generate(replace(BASE, lengths=EmpiricalLengths(pairs)))
    assert {(r.input_length, r.output_length) for r in trace} == set(pairs)


def test_the_seed_decides_everything() -> None:
    small = replace(BASE, seconds=100.0)
    assert generate(small) == generate(small)
    assert generate(small) != generate(replace(small, seed=1))
    times = [request.timestamp for request in generate(small)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": -1.0}, "seconds"),
        ({"rate_rps": 0.0}, "rate"),
        ({"rate_rps": 1e-9}, "no request"),
        ({"gap_cv": 0.0}, "gap_cv"),
        ({"alpha": -0.1}, "alpha"),
        ({"models": ()}, "models"),
    ],
)
def test_impossible_values_are_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generate(replace(BASE, **change))  # type: ignore[arg-type]
