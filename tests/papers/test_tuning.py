"""Every system is tuned with the same budget, the best of its settings is used, and every try is in
the report."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.papers.muxserve import muxserve_setup
from lab.papers.prism import prism_sweeps
from lab.papers.prism.prism_setup import Cluster
from lab.papers.seallm import seallm_setup
from lab.papers.study import lab as laboratory
from lab.papers.study import tuning
from lab.papers.study.lab import Lab
from lab.papers.study.trial import Trial, TrialOutcome
from prism.policies import registry
from prism_sim.scenario.scenario import read_config, resolve

COMPARED = {
    (name, *system)
    for part in (prism_sweeps, seallm_setup, muxserve_setup)
    for name, system in part.SYSTEMS.items()
}
EVERY = [(name.partition(" ")[0], tried) for name, tried in tuning.OPTIONS.items()]
SMALL = {
    "gpus": {"type": "h100", "count": 1},
    "models": [{"name": "Llama-3.2-1B"}],
    "generate": {"kind": "steady", "seconds": 5, "rate": 1},
}


def a_lab(folder: Path) -> Lab:
    return Lab(folder / "study", lambda what: nullcontext(lambda done, total: None), quick=True)


@pytest.mark.parametrize(("policy", "tried"), EVERY)
def test_no_policy_has_a_larger_budget(
    tmp_path: Path, policy: str, tried: tuple[tuning.Settings, ...]
) -> None:
    """Settings that repeat the shipped ones or each other would only look like a budget."""
    assert 1 < len(tried) <= tuning.TRIES
    assert tried[0] == {}
    path = a_lab(tmp_path).write("small", SMALL)
    seen = [read_config(Path(path), {**one, "policy": policy}) for one in tried]
    assert len({repr(config) for config in seen}) == len(tried)
    setups = [resolve(config, Path(path)).setup for config in seen]
    assert all(a != b for i, a in enumerate(setups) for b in setups[:i])


@pytest.mark.parametrize(("name", "policy", "variant"), sorted(COMPARED))
def test_all_that_is_compared_is_tuned(name: str, policy: str, variant: str) -> None:
    assert policy in registry.names()
    assert tuning.options(policy, variant)


@pytest.mark.parametrize(
    ("figures", "place"),
    [
        ((90.0, 90.0, 91.0, 91.0), 2),
        ((90.0, 90.0), 0),
        ((None, 1.0), 1),
        ((None, None), 0),
        ((2.0, None, 1.0), 0),
    ],
)
def test_the_best_is_taken_and_of_equals_the_first(
    figures: tuple[float | None, ...], place: int
) -> None:
    assert tuning.best_of(figures) == place


def test_every_try_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(trial: Trial) -> TrialOutcome:
        # better on the second trace by more than it is worse on the first
        better, first = "baselines.static_kv" in trial.changes, "small" in trial.config
        return TrialOutcome(trial.changes, lost=(0 if first else 4) if better else 1)

    monkeypatch.setattr(laboratory, "simulate", simulate)
    lab = replace(a_lab(tmp_path), quick=False)
    found = tuning.tune(
        lab,
        [lab.write("small", SMALL), lab.write("other", {**SMALL, "seed": 1})],
        {"parts": ("static", ""), "prism": ("prism", "")},
        lambda measured: float(measured.lost),
        load="a load",
        what="a measure",
        fixed={"rate_scale": 2.0},
    )
    assert found.of("parts") == {"baselines.static_kv": "tokens"}
    assert found.of("prism") == found.of("not tuned") == {}
    assert found.log == (
        "Tuned on a load, by a measure. parts: as shipped 1, static_kv tokens 2 (taken), "
        "static_kv rates 2; "
        "prism: as shipped 1 (taken), idle_threshold 10s 1, rate_window 20s 1, "
        "idle_threshold 10s and rate_window 20s 1",
    )


def test_what_was_taken_is_used_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"baselines.static_kv": "tokens"}
    chosen = tuning.Tuned({"static": settings})
    cluster = Cluster("x.yaml", (1, 1), (1, 1), chosen)
    changes = prism_sweeps.at(cluster, "static", rate_scale=2.0).changes
    assert changes == {**settings, "rate_scale": 2.0, "policy": "static"}
    monkeypatch.setattr(laboratory, "simulate", lambda trial: TrialOutcome(trial.changes))
    lab = a_lab(tmp_path)
    setups = {2.0: lab.write("small", SMALL)}
    systems = {"static": ("static", ""), "prism": ("prism", "")}
    same = {"slo_scale": 3.0}
    (found,) = tuning.simulated(lab, setups, systems, chosen, same, key="rate_scale").values()
    assert found["static"].changes == {**changes, **same}
    assert found["prism"].changes == {"rate_scale": 2.0, **same, "policy": "prism"}


TRACES: dict[str, Any] = {
    "prism": lambda lab: prism_sweeps.tuned(lab, "hyperbolic"),
    "seallm": seallm_setup.tuned_systems,
    "muxserve": muxserve_setup.tuned_systems,
}


@pytest.mark.parametrize("family", TRACES)
def test_tuning_is_the_same_each_time_and_on_no_evaluated_trace(
    tmp_path: Path, family: str
) -> None:
    found = TRACES[family](a_lab(tmp_path / "0"))
    assert found == TRACES[family](a_lab(tmp_path / "1"))
    assert found.log[0].startswith("Tuned on ")
    assert found.log[0].count("as shipped") == found.log[0].count("(taken)")
    assert "not simulated" not in found.log[0]
    # the trace that it would be with the run's own seed, which studies evaluate
    TRACES[family](replace(a_lab(tmp_path / "2"), tuning_seed=0))
    # another seed is tuned on the same traces
    assert TRACES[family](replace(a_lab(tmp_path / "3"), seed=10)) == found
    first, again, own = (
        {path.name: path.read_bytes() for path in (tmp_path / run).rglob("*.jsonl")}
        for run in "012"
    )
    assert first
    assert first == again
    assert not set(first.values()) & set(own.values())
