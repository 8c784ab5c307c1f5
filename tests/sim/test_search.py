"""Rates of the models, as placement searches get them."""

from __future__ import annotations

from typing import Any

import pytest

from prism.policies import registry
from prism_sim.core.profile import loads
from prism_sim.placement.search import PIECES, expected, problem
from tests.sim.clusters import cluster, model, request, work

MODELS = [model(0, "steady"), model(1, "bursty"), model(2, "never")]
SETUP = cluster(MODELS)
STEADY = [request(i * 1.0, "steady") for i in range(101)]
BURST = [request(42.0 + i / 100, "bursty") for i in range(50)]
WORK = work(SETUP, sorted([*STEADY, *BURST], key=lambda r: r.timestamp))


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ("mean", [1.01, 0.5, 0.0]),
        ("peak", [11 / (100 / PIECES), 50 / (100 / PIECES), 0.0]),
        ("equal", [151 / 300] * 3),
    ],
)
def test_rates_are_mean_peak_or_equal(rates: str, said: list[float]) -> None:
    whole = loads(SETUP, WORK)
    found = expected(whole, WORK, rates)
    assert [load.rate_rps for load in found] == pytest.approx(said)
    assert [load.prompt_tokens for load in found] == [load.prompt_tokens for load in whole]


def test_the_search_is_given_them() -> None:
    setup = cluster(MODELS, search_rates="equal")
    never: Any = None  # nothing is simulated
    given = problem(setup, registry.get(setup.policy), loads(setup, WORK), never, WORK)
    assert [m.rate_rps for m in given.models] == pytest.approx([151 / 300] * 3)
