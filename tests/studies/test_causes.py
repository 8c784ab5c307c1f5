"""Ablations compare like with like, and name no cause where nothing is missing."""

from __future__ import annotations

from prism.studies.muxserve import Lines, host_cause
from prism.studies.prism_pair import by_deadline_drops
from prism.studies.prism_sweeps import GIVEN, orders


def line(*values: float) -> list[tuple[float, float | None]]:
    return list(zip((1.0, 2.0, 3.0), values, strict=False))


def test_both_sides_at_the_rate_that_was_changed() -> None:
    rates: Lines = {"muxserve": line(1.0, 0.8, 1.0), "spatial": line(1.0, 1.0, 1.0)}
    slow: Lines = {"muxserve": [(2.0, 1.1)], "spatial": [(2.0, 1.0)]}
    found = host_cause("throughput", rates, slow, "spatial")
    assert (found.ours, found.verdict) == ("0.80x, changed 1.10x", "names the cause")
    assert "at 2 req/s" in found.what


def test_drops_by_deadline_explain_only_those_that_are_missing() -> None:
    assert by_deadline_drops(3, 5) == []
    assert by_deadline_drops(None, 5) == []
    assert [c.verdict for c in by_deadline_drops(0, 5)] == ["names the cause"]
    assert [c.verdict for c in by_deadline_drops(0, 0)] == ["is not the cause"]


def test_tp_degrees_explain_only_where_muxserve_is_ahead() -> None:
    """A pair that is nearly equal is as published, and needs no cause."""
    ahead = orders("x", {"prism": 90.0, "muxserve++": 99.0, GIVEN: 60.0}, "Figure 7")
    assert [c.verdict for c in ahead][1] == "names the cause"
    assert ahead[1].ours == "0.91x, changed 1.50x"
    still = orders("x", {"prism": 90.0, "muxserve++": 99.0, GIVEN: 98.0}, "Figure 7")
    assert still[1].verdict == "is not the cause"
    equal = orders("x", {"prism": 99.0, "muxserve++": 100.0, GIVEN: 60.0}, "Figure 7")
    assert [c.agrees for c in equal] == [True, True]
