"""Figure 11's text on attainments with and without the scheduler."""

from __future__ import annotations

import pytest

from lab.papers.prism.prism_pair import Shares, load_causes, published_statements, spare_time_cause


def pair(first: float, second: float, before: tuple[float, float] = (95.0, 40.0)) -> Shares:
    return {"with": (first, second), "without": before}


@pytest.mark.parametrize(
    ("gained", "agrees"), [(40.1, True), (40.0, False), (20.0, False), (55.0, True)]
)
def test_more_than_40_points(gained: float, agrees: bool) -> None:
    assert published_statements({11.0: [pair(95.0, 40.0 + gained)]})[0].agrees is agrees


def test_a_gain_at_which_the_first_model_collapses_does_not_count() -> None:
    found = published_statements({11.0: [pair(95.0, 50.0)], 15.0: [pair(30.0, 95.0)]})
    assert [c.agrees for c in found] == [False, False, False]
    assert found[0].ours == "10 points at most"
    assert [c.agrees for c in published_statements({15.0: [pair(30.0, 95.0)]})[:2]] == [None, None]


def test_the_gain_as_a_part_of_what_it_has_without() -> None:
    points, part, _ = published_statements({11.0: [pair(95.0, 60.0)]})
    assert (points.agrees, part.agrees) == (False, True)
    assert (points.ours, part.ours) == ("20 points at most", "50 % at most")


def test_the_load_is_no_cause_of_what_is_the_same_at_all() -> None:
    same = {rate: [pair(95.0, 40.0)] for rate in (11.0, 15.0)}
    assert {c.verdict for c in load_causes(same)} == {"is not the cause"}
    other = {11.0: [pair(95.0, 40.0)], 15.0: [pair(95.0, 60.0)]}
    assert [c.verdict for c in load_causes(other)] == ["names a cause", "is not the cause"]


def test_time_to_spare_is_the_cause_only_if_both_statements_hold() -> None:
    here = {13.0: [pair(70.0, 60.0)]}
    verdicts = {
        (99.0, 85.0): "names the cause",
        (99.0, 70.0): "in its direction",
        (85.0, 85.0): "in its direction",
        (71.0, 90.0): "is not the cause",
    }
    for shares, verdict in verdicts.items():
        assert [c.verdict for c in spare_time_cause(here, {13.0: [pair(*shares)]})] == [verdict]
    assert spare_time_cause(here, {}) == []
