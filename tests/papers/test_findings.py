"""Verdicts agree with the figures."""

from __future__ import annotations

import pytest

from lab.papers.study import findings
from lab.papers.study.findings import Statement
from lab.papers.study.lines import first_at_target, up_to


@pytest.mark.parametrize(
    ("ours", "published", "agrees", "verdict"),
    [
        (2.0, 4.0, True, "same direction, 0.50 of the published factor"),
        (1.5, None, True, "same direction"),
        (1.01, 4.0, False, "no difference here"),
        (0.5, 4.0, False, "the other way round"),
        (None, 4.0, None, "cannot be formed here"),
    ],
)
def test_factor(
    ours: float | None, published: float | None, agrees: bool | None, verdict: str
) -> None:
    found = findings.factor("x", ours, published, "Table 1")
    assert (found.agrees, found.verdict) == (agrees, verdict)


@pytest.mark.parametrize(
    ("ours", "agrees", "verdict"),
    [(99.5, True, "same"), (80.0, True, "near"), (40.0, False, "0.40 of the published")],
)
def test_value(ours: float, agrees: bool, verdict: str) -> None:
    found = findings.value("x", ours, 100.0, "Table 1", unit="%")
    assert (found.agrees, found.verdict, found.published) == (agrees, verdict, "100 %")


def test_a_target_that_is_never_met_disagrees() -> None:
    found = findings.reached("x", None, 4, "Figure 7", unit="GPUs", most=8)
    assert (found.ours, found.published, found.agrees) == ("not up to 8", "4 GPUs", False)
    assert findings.reached("x", 4, 4, "Figure 7", unit="GPUs", most=8).agrees is True


def test_order_names_the_pairs_that_differ() -> None:
    ours = {"a": 90.0, "b": 92.0, "c": 95.0, "d": None}
    found = findings.order("x", ours, ("a", "b", "c", "d"), "Figure 7")
    assert found.verdict == "differs in 3 of 3 pairs: b before a, c before a, c before b"
    assert found.agrees is False
    reverse = findings.order("x", ours, ("c", "b", "a"), "Figure 7")
    assert (reverse.verdict, reverse.agrees) == ("same order", True)
    assert reverse.ours == "c 95 > b 92 > a 90"
    smaller = findings.order("x", ours, ("a", "b", "c"), "Figure 7", smaller=True)
    assert (smaller.ours, smaller.agrees) == ("a 90 > b 92 > c 95", True)
    assert findings.order("x", {"a": 1.0}, ("a", "b"), "Figure 7").agrees is None


@pytest.mark.parametrize(
    ("published", "verdict", "agrees"),
    [
        (("prism", "mux", "static"), "same order, but prism and mux are equal here", None),
        (("mux", "prism", "static"), "same order, but mux and prism are equal here", None),
        (("prism", "static"), "same order", True),
        (("prism", "mux"), "no difference here", None),
        (
            ("static", "prism", "mux"),
            "differs in 2 of 3 pairs: prism before static, mux before static,"
            " but prism and mux are equal here",
            False,
        ),
    ],
)
def test_a_tie_decides_no_order(
    published: tuple[str, ...], verdict: str, agrees: bool | None
) -> None:
    ours = {"prism": 99.1, "mux": 99.21, "static": 60.0}
    found = findings.order("x", ours, published, "Table 1")
    assert (found.verdict, found.agrees) == (verdict, agrees)
    if len(published) == 3:
        assert found.ours == "mux 99.21 = prism 99.1 > static 60"


@pytest.mark.parametrize(
    ("ours", "verdict", "agrees"),
    [
        ({"5 s": 94.4, "45 s": 93.4, "90 s": 93.0}, "no difference here", None),
        ({"5 s": 94.4, "45 s": 93.4, "90 s": 80.0}, "holds, but 5 s and 45 s are equal here", None),
        ({"5 s": 96.4, "45 s": 93.4, "90 s": 93.4}, "does not hold here: 5 s before 45 s", False),
        ({"5 s": 90.0, "45 s": 93.4, "90 s": 80.0}, "holds", True),
        ({"45 s": 93.4}, "cannot be said here", None),
    ],
)
def test_the_best_of_several(ours: dict[str, float], verdict: str, agrees: bool | None) -> None:
    found = findings.best("x", "45 s", ours, "best at about 45 s", "OSDI 2026", unit="%")
    assert (found.verdict, found.agrees) == (verdict, agrees)
    assert "45 s 93.4 %" in found.ours


def test_overall_counts_what_can_be_said() -> None:
    yes, no, open_ = (Statement("", "", "", "", "", a) for a in (True, False, None))
    assert findings.overall([yes, yes, open_]) == "agrees (2 of 2)"
    assert findings.overall([yes, no]) == "partly (1 of 2 agree)"
    assert findings.overall([no, open_]) == "differs (0 of 1 agree)"
    assert findings.overall([open_]) == "nothing to compare"


def test_where_a_line_crosses_the_target() -> None:
    assert up_to([(1, 100.0), (2, 99.5), (4, 98.5)]) == 3.0
    assert up_to([(1, 100.0), (2, 99.0)]) == 2.0
    assert up_to([(1, 98.0), (2, 99.5)]) is None
    assert up_to([(1, None)]) is None
    assert first_at_target([(2, 90.0), (3, 99.0), (4, 98.0)]) == 3.0
    assert first_at_target([(2, 90.0)]) is None


@pytest.mark.parametrize(
    ("here", "changed", "verdict"),
    [
        (0.9, 1.1, "names the cause"),
        (0.9, 0.95, "in its direction"),
        (0.9, 0.9, "is not the cause"),
        (0.9, None, "cannot be formed here"),
        # nothing is missing, or nothing was moved
        (1.5, 1.05, "is not the cause"),
        (1.3, 1.3, "is not the cause"),
        (1.019, 1.03, "is not the cause"),
        (1.0, 1.02, "is not the cause"),
    ],
)
def test_a_cause_is_what_turns_a_factor(here: float, changed: float | None, verdict: str) -> None:
    found = findings.cause("with slower hosts", here, changed)
    assert (found.verdict, found.agrees) == (verdict, None)
