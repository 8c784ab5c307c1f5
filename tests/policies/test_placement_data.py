"""The figures of a simulation's outcome, and where a placement holds a model."""

from __future__ import annotations

import pytest

from prism.policies.placement import Hosted, Placement, PlacementOutcome, Unit


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
