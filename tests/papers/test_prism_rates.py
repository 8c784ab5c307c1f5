"""What turns Prism's Figure 7: each change is made to the systems it is of, and said by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from papers import prism_sweeps
from papers.lab import Lab
from papers.lines import Lines
from papers.prism_overall import STARTED, engine_starts, less_memory
from papers.prism_setup import Cluster
from papers.prism_sweeps import AS_FAST, TIGHT
from papers.trial import Trial

NO_LAB = cast(Lab, None)
CLUSTER = Cluster("setup.yaml", "", (1.0, 1.0), (1.0, 1.0))


Attained = Callable[[Trial, str], float | None]


def with_attainments(monkeypatch: pytest.MonkeyPatch, attainment: Attained) -> list[Trial]:
    """Trials have these attainments without being simulated; returns the list that they go to."""
    asked: list[Trial] = []

    def attained(lab: Lab, trials: Sequence[Trial], metric: str) -> list[float | None]:
        asked.extend(trials)
        return [attainment(trial, metric) for trial in trials]

    monkeypatch.setattr(prism_sweeps, "attained", attained)
    return asked


def changed(trial: Trial, changes: dict[str, Any]) -> bool:
    return all(trial.changes.get(key) == value for key, value in changes.items())


def test_tpot_on_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same rates with all of it, of which those above Table 1's load are none."""
    shares = {("static", 32.0): 80.0}

    def attainment(trial: Trial, metric: str) -> float:
        assert metric == "tpot"
        return shares.get((trial.changes["policy"], trial.changes["rate_scale"]), 99.0)

    trials = with_attainments(monkeypatch, attainment)
    level: Lines = {
        name: [(8.0, 100.0), (16.0, 100.0), (32.0, 99.5), (48.0, 100.0)]
        for name in ("static", "muxserve++")
    }
    found = less_memory(NO_LAB, CLUSTER, "x", {"slo_scale": 20.0}, level)
    assert [c.verdict.partition(":")[0] for c in found] == ["names the cause", "is not the cause"]
    assert found[0].ours == (
        "100.0 % at rate scale 8, 99.5 % at 32; changed 99.0 % at rate scale 8, 80.0 % at 32"
    )
    assert all(changed(trial, {"gpus.memory": TIGHT, "slo_scale": 20.0}) for trial in trials)
    fell: Lines = {"static": [(8.0, 100.0), (32.0, 80.0), (48.0, 100.0)]}
    (found_too,) = less_memory(NO_LAB, CLUSTER, "x", {}, fell)
    assert found_too.verdict.startswith("is not the cause")
    assert less_memory(NO_LAB, CLUSTER, "x", {}, {}) == []


def test_who_starts_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, or neither: each side of each ratio at all rates."""
    values = {
        ("serverlessllm", 8.0): 40.0,
        ("serverlessllm", 16.0): 60.0,
        ("qlm", 8.0): 70.0,
        ("qlm", 16.0): 90.0,
    }

    def attainment(trial: Trial, metric: str) -> float:
        policy, rate = trial.changes["policy"], trial.changes["rate_scale"]
        assert changed(trial, {"serverlessllm": STARTED, "qlm": AS_FAST}[policy])
        return values[policy, rate]

    with_attainments(monkeypatch, attainment)
    found: Lines = {
        "qlm": [(8.0, 30.0), (16.0, 50.0)],
        "serverlessllm": [(8.0, 70.0), (16.0, 90.0)],
    }
    both, neither = engine_starts(
        NO_LAB, CLUSTER, {"slo_scale": 20.0}, "mean", metric="ttft", found=found
    )
    assert both.ours == "0.50x, changed 0.80x"
    assert neither.ours == "0.50x, changed 1.00x"
    assert [c.verdict for c in (both, neither)] == ["in its direction"] * 2


def test_points_that_were_not_simulated_turn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_attainments(monkeypatch, lambda trial, metric: None)
    found: Lines = {"qlm": [(8.0, 30.0)], "serverlessllm": [(8.0, 70.0)]}
    made = engine_starts(NO_LAB, CLUSTER, {"slo_scale": 20.0}, "mean", metric="ttft", found=found)
    assert [c.verdict for c in made] == ["cannot be formed here"] * 2
