"""Confidence intervals over seeds: t quantiles as printed tables have them, and their use in sweeps
and plans."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest

from prism_replay.intervals import Interval, interval, t_quantile
from tests.sim.command import call

CONFIG = """
gpus: {type: h100, count: 1, memory: 40GiB}
models: [{name: a, shape: Llama-3.1-8B}, {name: b, shape: Llama-3.2-1B}]
slo: {ttft: 40ms, tpot: 9ms}
generate: {seconds: 20, rate: 6}
"""
# two-sided 95 %, as in any table
T_95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    9: 2.262,
    10: 2.228,
    29: 2.045,
    30: 2.042,
    100: 1.984,
    1000: 1.962,
}


@pytest.mark.parametrize("freedom", T_95)
def test_quantiles_are_those_of_printed_tables(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(T_95[freedom], abs=5e-4)


def test_other_levels() -> None:
    assert t_quantile(1, 0.5) == pytest.approx(1.0)
    assert t_quantile(4, 0.99) == pytest.approx(4.604, abs=5e-4)
    assert t_quantile(7, 0.9) == pytest.approx(1.895, abs=5e-4)


def test_an_interval_by_hand() -> None:
    """Uses five values with mean 3 and standard deviation sqrt(2.5)."""
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776445 * 2.5**0.5 / 5**0.5, abs=1e-5)
    assert interval([0.7]) == Interval(0.7, 0.0)


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(4000):
        mean, half = interval([draw.gauss(5.0, 2.0) for _ in range(4)])
        held += abs(mean - 5.0) <= half
    assert held / 4000 == pytest.approx(0.95, abs=0.01)


MEASURED = ("attainment_all", "ttft_p99_ms", "e2e_p99_ms", "normalized_latency", "busy")
MEASURED += ("requests_per_s", "requests_per_active_s", "output_tokens_per_active_s")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


def test_a_sweep_over_seeds_has_means_and_intervals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    out, alone = tmp_path / "out", tmp_path / "alone"
    vary = ("--vary", "policy=prism,static", "--jobs", "1")
    seeds = ("--seeds", "3", "--set", "seed=5")
    assert call(monkeypatch, "sweep", str(config), *vary, *seeds, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "±" in shown
    assert "E2E / alone" in shown
    by_seed = ("--vary", "seed=5,6,7", "--out", str(alone))
    assert call(monkeypatch, "sweep", str(config), *vary, *by_seed) == 0
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    single = list(csv.DictReader((alone / "sweep.csv").read_text().splitlines()))
    assert [(row["policy"], row["seeds"]) for row in rows] == [("prism", "3"), ("static", "3")]
    for row in rows:
        own = [s for s in single if s["policy"] == row["policy"]]
        for column in MEASURED:
            mean, half = interval([float(s[column]) for s in own])
            assert float(row[column]) == pytest.approx(mean)
            assert float(row[f"{column}_ci95"]) == pytest.approx(half)
            assert half > 0
    assert "seeds" not in single[0]
    outcomes = json.loads((out / "sweep.json").read_text())
    assert [outcome["changes"]["seed"] for outcome in outcomes] == [5, 6, 7, 5, 6, 7]


def test_a_plan_over_seeds_meets_the_target_in_the_mean(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    given = ("--policies", "prism", "--seeds", "3", "--max-gpus", "2", "--target", "0.9")
    command = ("plan", str(config), *given, "--metric", "all", "--jobs", "1")
    assert call(monkeypatch, *command, "--out", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    assert "±" in shown
    assert "E2E / alone" in shown
    (plan,) = json.loads((tmp_path / "out" / "plan.json").read_text())
    (row,) = csv.DictReader((tmp_path / "out" / "plan.csv").read_text().splitlines())
    assert len(list((tmp_path / "out" / "points").iterdir())) == 3 * len(plan["tried"])
    assert float(row["attainment"]) == plan["attainment"]
    half = plan["half_widths"][row["gpus"].rstrip("+")]
    assert float(row["attainment_ci95"]) == half > 0
    assert plan["seeds"] == int(row["seeds"]) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--seeds", "0"), "--seeds 0: must be >= 1"),
        (("--seeds", "2", "--vary", "seed=1,2"), "--seeds: cannot be combined with --vary seed"),
    ],
)
def test_seeds_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    *,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    given = ("--vary", "policy=prism", *arguments, "--out", str(tmp_path / "out"))
    assert call(monkeypatch, "sweep", str(config), *given) == 2
    assert says in capsys.readouterr().err


def test_a_trace_of_a_file_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    row = {"timestamp": 0, "model": "a", "input_length": 5, "output_length": 3}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    config.write_text(CONFIG.replace("generate: {seconds: 20, rate: 6}", "trace: t.jsonl"))
    given = ("--policies", "static", "--max-gpus", "1", "--seeds", "2", "--jobs", "1")
    assert call(monkeypatch, "plan", str(config), *given) == 0
    assert "warning: --seeds: the trace is a file" in capsys.readouterr().err
