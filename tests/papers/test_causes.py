"""Ablations compare like with like, and name no cause where nothing is missing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from papers import seallm_sweeps
from papers.lab import Lab
from papers.lines import Lines
from papers.muxserve import always_cause, behind, host_cause
from papers.muxserve_parts import apart, fairness
from papers.prism_pair import by_deadline_drops
from papers.prism_sweeps import GIVEN, orders
from papers.seallm import drift_cause
from papers.seallm_setup import FIXED, SERVICES, ServiceLoad, _part
from papers.seallm_statements import best_ahead, crowded_cause, place_causes
from papers.trial import ModelMeasure, TrialOutcome
from papers.tuning import AS_SHIPPED


def line(*values: float) -> list[tuple[float, float | None]]:
    return list(zip((1.0, 2.0, 3.0), values, strict=False))


def test_both_sides_at_the_rate_that_was_changed() -> None:
    rates: Lines = {"muxserve": line(1.0, 0.8, 1.0), "spatial": line(1.0, 1.0, 1.0)}
    slow: Lines = {"muxserve": line(0.5, 1.1), "spatial": line(1.0, 1.0)}
    found = host_cause("throughput", rates, slow, "spatial", 2.0)
    assert (found.ours, found.verdict) == ("0.80x, changed 1.10x", "names the cause")
    assert "at 2 req/s" in found.what


def test_only_rates_at_which_muxserve_is_behind_ask_for_a_cause() -> None:
    rates: Lines = {
        "muxserve": line(0.9, 1.0, 0.8),
        "spatial": line(1.0, 1.0, 0.9),
        "temporal": line(0.9, 0.9, 1.0),
    }
    assert behind(rates) == [1.0, 3.0]
    slow: Lines = {name: line(1.0, 0.5, 1.0) for name in rates}
    slow["muxserve"] = line(1.0, 0.1, 0.99)
    found = always_cause("highest", rates, slow)
    assert (found.ours, found.verdict) == ("0.80x, changed 0.99x", "names the cause")
    assert "at 1 and 3 req/s" in found.what
    slow["muxserve"] = line(1.0, 2.0, 0.9)
    assert always_cause("highest", rates, slow).verdict == "in its direction"


def test_fair_parts_are_what_the_requests_ask_for() -> None:
    def holding(*kv_bytes: float) -> TrialOutcome:
        parts = zip("ab", kv_bytes, (30.0, 10.0), strict=True)
        found = {
            name: ModelMeasure(1, 1, None, 1.0, 1.0, kv_bytes=held, asked_kv_bytes=asked)
            for name, held, asked in parts
        }
        return TrialOutcome({}, models=found)

    orders_of = {"adbs": holding(7.0, 3.0), "round-robin": holding(5.0, 5.0)}
    assert [apart(found) for found in orders_of.values()] == pytest.approx([10.0, 50.0])
    assert fairness("a", orders_of, "Figure 10").agrees is True
    assert fairness("a", {"adbs": holding(0.0, 0.0)}, "Figure 10").agrees is None


def test_drops_by_deadline_explain_only_those_that_are_missing() -> None:
    assert by_deadline_drops(3, 5) == []
    assert by_deadline_drops(None, 5) == []
    assert [c.verdict for c in by_deadline_drops(0, 5)] == ["names the cause"]
    assert [c.verdict for c in by_deadline_drops(0, 0)] == ["is not the cause"]


def test_tp_degrees_explain_only_where_muxserve_is_ahead() -> None:
    """A pair that is nearly equal decides nothing, and needs no cause."""
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


def test_seallm_is_explained_only_where_a_baseline_is_ahead() -> None:
    """Within 2 % is as published."""
    assert best_ahead(SEALLM, smaller=False) == [(3.0, "muxserve")]
    shares, queues = place_causes("SLO", SEALLM, {"seallm": [(3.0, 85.0)]}, smaller=False)
    assert (shares.ours, shares.verdict) == ("0.84x, changed 0.99x", "names the cause")
    assert (queues.ours, queues.verdict) == ("0.84x, changed 0.89x", "in its direction")


def test_baselines_that_are_ahead_are_seen_at_the_papers_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the most crowded cluster alone, and but for AlpaServe, whose search takes minutes."""

    def attaining(**shares: float) -> dict[str, TrialOutcome]:
        return {name: TrialOutcome({}, normalized_latency=share) for name, share in shares.items()}

    there = {seallm_sweeps.WHOLE: attaining(seallm=1.0, vllm=1.5, muxserve=0.5)}
    monkeypatch.setattr(seallm_sweeps, "at_whole_size", lambda lab, tuned: there)
    found: Lines = {
        "seallm": [(1.0, 2.0), (seallm_sweeps.CROWDED, 2.0)],
        **{name: [(1.0, 1.0), (seallm_sweeps.CROWDED, 1.0)] for name in ("vllm", "alpaserve")},
        "muxserve": [(1.0, 1.0), (seallm_sweeps.CROWDED, 3.0)],
    }
    lab = Lab(tmp_path, lambda what: nullcontext(lambda done, total: None))
    (made,) = seallm_sweeps._size_causes(lab, AS_SHIPPED, "normalised latency", found)
    assert "over vllm, 16 GPUs" in made.what
    assert (made.ours, made.verdict) == ("0.50x, changed 1.50x", "names the cause")


def test_muxserve_left_out_must_give_the_largest_lead() -> None:
    assert crowded_cause(SEALLM).verdict == "names the cause"
    less: Lines = {
        **SEALLM,
        "alpaserve": line(80.0, 80.0, 79.0),
        "muxserve": line(90.0, 80.0, 95.0),
    }
    assert crowded_cause(less).verdict == "in its direction"


def test_replacement_is_judged_by_means_over_the_traces() -> None:
    drifted = {
        name: [TrialOutcome({}, normalized_latency=value) for value in values]
        for name, values in (("seallm", (2.0, 4.0)), ("A", (8.0, 1.0)))
    }
    made = drift_cause("latency", 1.0, drifted, smaller=True)
    assert (made.ours, made.verdict) == ("1.00x, changed 1.50x", "names the cause")


def test_parts_of_the_requests_add_up() -> None:
    for popular in ("", "chat-13b"):
        load = ServiceLoad(1.0, 1.0, popular=popular)
        assert sum(_part(load, s.name) for s in SERVICES) == pytest.approx(1.0)
    assert _part(load, "chat-13b") > 2 * _part(load, "chat-7b")
