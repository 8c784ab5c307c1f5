"""Ablations compare equal settings, and name no cause for an equal result."""

from __future__ import annotations

import pytest

from lab.papers.muxserve.muxserve_parts import fairness, unfairness
from lab.papers.prism.prism_pair import by_deadline_drops
from lab.papers.prism.prism_sweeps import GIVEN, orders
from lab.papers.seallm.seallm_setup import FIXED
from lab.papers.seallm.seallm_statements import crowded_cause
from lab.papers.study.lines import Lines
from lab.papers.study.trial import ModelMeasure, TrialOutcome


def line(*values: float) -> list[tuple[float, float | None]]:
    return list(zip((1.0, 2.0, 3.0), values, strict=False))


def test_fair_parts_are_what_the_requests_ask_for() -> None:
    def holding(*kv_bytes: float) -> TrialOutcome:
        parts = zip("ab", kv_bytes, (30.0, 10.0), strict=True)
        found = {
            name: ModelMeasure(1, 1, 1.0, kv_bytes=held, asked_kv_bytes=asked)
            for name, held, asked in parts
        }
        return TrialOutcome({}, models=found)

    orders_of = {"adbs": holding(7.0, 3.0), "round-robin": holding(5.0, 5.0)}
    assert [unfairness(found) for found in orders_of.values()] == pytest.approx([10.0, 50.0])
    assert fairness("a", orders_of, "Figure 10").agrees is True
    assert fairness("a", {"adbs": holding(0.0, 0.0)}, "Figure 10").agrees is None


def test_drops_by_deadline_explain_only_those_that_are_missing() -> None:
    assert by_deadline_drops(3, 5) == []
    assert by_deadline_drops(None, 5) == []
    assert [c.verdict for c in by_deadline_drops(0, 5)] == ["names the cause"]
    assert [c.verdict for c in by_deadline_drops(0, 0)] == ["is not the cause"]


def test_tp_degrees_explain_only_where_muxserve_is_ahead() -> None:
    """Pairs that are nearly equal decide nothing and need no cause."""
    ahead = orders("x", {"prism": 90.0, "muxserve++": 99.0, GIVEN: 60.0}, "Figure 7")
    assert [c.verdict for c in ahead][1] == "names the cause"
    assert ahead[1].ours == "0.91x, changed 1.50x"
    still = orders("x", {"prism": 90.0, "muxserve++": 99.0, GIVEN: 98.0}, "Figure 7")
    assert still[1].verdict == "is not the cause"
    equal = orders("x", {"prism": 99.0, "muxserve++": 100.0, GIVEN: 60.0}, "Figure 7")
    assert [c.agrees for c in equal] == [None, True]


SEALLM: Lines = {
    "seallm": line(100.0, 100.0, 80.0),
    "vllm": line(90.0, 99.0, 50.0),
    "alpaserve": line(100.0, 98.0, 70.0),
    "muxserve": line(101.0, 97.0, 95.0),
    FIXED: line(90.0, 90.0, 81.0),
}


def test_muxserve_left_out_must_give_the_largest_lead() -> None:
    assert crowded_cause(SEALLM).verdict == "names the cause"
    less: Lines = {
        **SEALLM,
        "alpaserve": line(80.0, 80.0, 79.0),
        "muxserve": line(90.0, 80.0, 95.0),
    }
    assert crowded_cause(less).verdict == "in its direction"
