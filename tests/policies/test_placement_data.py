"""The figures of a simulated placement, where it holds a model, and which of two is better."""

from __future__ import annotations

import pytest

from prism.policies.placement import (
    Hosted,
    Placement,
    PlacementOutcome,
    Problem,
    Unit,
    better,
)


def test_attainment_counts_requests_not_models() -> None:
    outcome = PlacementOutcome({"a": 9, "b": 1}, {"a": 0, "b": 1}, {"a": 2.0, "b": 0.0})
    assert outcome.attainment == pytest.approx(0.9)
    assert outcome.mean_normalized_latency == 2.0


def test_nothing_asked_is_all_attained() -> None:
    outcome = PlacementOutcome({}, {}, {})
    assert (outcome.attainment, outcome.mean_normalized_latency) == (1.0, 0.0)


def test_a_model_may_have_several_homes() -> None:
    wide, narrow = Unit(("g0", "g1"), (Hosted("a"), Hosted("b"))), Unit(("g2",), (Hosted("a"),))
    placement = Placement((wide, narrow))
    assert placement.homes("a") == (wide, narrow)
    assert placement.homes("b") == (wide,)
    assert (wide.tp, narrow.tp) == (2, 1)


def outcomes(
    kept: PlacementOutcome, found: PlacementOutcome
) -> tuple[Problem, Placement, Placement]:
    old, new = Placement((), score=0.3), Placement((Unit(("g0",)),), score=0.4)
    by_units = {old.units: kept, new.units: found}
    return Problem((), (), simulate=lambda placement: by_units[placement.units]), old, new


def outcome(late: int, latency: float) -> PlacementOutcome:
    return PlacementOutcome({"a": 10}, {"a": late}, {"a": latency})


@pytest.mark.parametrize(
    ("late", "latency"), [(0, 9.0), (1, 1.8)], ids=["attainment", "clearly lower latency"]
)
def test_a_better_placement_replaces_the_present_one(late: int, latency: float) -> None:
    problem, old, new = outcomes(outcome(1, 2.0), outcome(late, latency))
    assert better(problem, old, new) is new


@pytest.mark.parametrize(
    ("late", "latency"), [(1, 2.0), (1, 1.95), (2, 1.0)], ids=["equal", "hardly", "worse"]
)
def test_another_placement_does_not(late: int, latency: float) -> None:
    problem, old, new = outcomes(outcome(1, 2.0), outcome(late, latency))
    found = better(problem, old, new)
    assert (found.units, found.score) == (old.units, 0.9)
