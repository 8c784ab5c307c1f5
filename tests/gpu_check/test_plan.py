"""Order of the steps of scripts/gpu-check, and the time that each needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.gpu_check import plan
from lab.gpu_check.serving import cluster, elastic, engine, float8, hybrid, large, overhead
from tests.kvcached.compiling import ROOT

KEPT_S = {
    "engine": engine.JUDGE_S,
    "elastic": elastic.JUDGE_S,
    "cluster": cluster.END_S + cluster.JUDGE_S,
    "fp8": float8.JUDGE_S,
    "hybrid": hybrid.JUDGE_S,
    "large": large.JUDGE_S,
    "overhead": overhead.END_S,
}
START_S = 30.0  # imports of SGLang, an engine and a model


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("carried", [True, False])
def test_a_step_is_left_out_unless_its_engine_has_time_to_start(
    *, carried: bool, quick: bool
) -> None:
    """Adds the time that the step keeps for later checks."""
    steps = {step.name: step for step in plan.steps(carried=carried, quick=quick)}
    short = {
        name: step.needs_s
        for name, step in steps.items()
        if name in KEPT_S and step.needs_s < KEPT_S[name] + START_S
    }
    assert not short
    assert all(step.needs_s <= step.limit_s for step in steps.values())


@pytest.mark.parametrize("carried", [True, False])
def test_every_step_of_a_quick_run_has_a_limit_there_and_is_in_the_full_one(
    *, carried: bool
) -> None:
    quick, full = ([*plan.steps(carried=carried, quick=short)] for short in (True, False))
    names = ({step.name for step in steps} for steps in (full, quick))
    assert set.difference(*names) == {"benches", "fp8", "hybrid", "large"}
    for steps in (quick, full):
        names = [step.name for step in steps]
        assert len(names) == len(set(names))
        assert all(step.limit_s > 0 for step in steps)


def test_what_needs_kvcached_alone_runs_while_sglang_is_unpacked() -> None:
    names = [step.name for step in plan.steps(carried=True, quick=True)]
    assert names[:5] == ["facts", "probe", "graphs", "fork", "unpack"]
    assert names[-1] == "faults"  # may take the GPU down


def test_an_installed_package_of_the_same_name_hides_no_script(tmp_path: Path) -> None:
    for name in ("lab", "tests", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check", "--help"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
