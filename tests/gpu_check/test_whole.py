"""scripts/gpu-check and scripts/gpu-day from end to end on doubles, build and SGLang included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lab.gpu_check import plan
from lab.gpu_check.expected import BY_NAME
from tests.kvcached.compiling import ROOT

NAMES = [step.name for step in plan.steps(carried=False, quick=False)]
FILES = {"gpu-check.json", "gpu-check.log", "gpu-check.md"}
MIB = 1 << 20


@cache
def rehearsed(folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    """Runs `gpu-check --doubles`. Returns its output, and the result of each step."""
    places = ["--out", str(folder / "out"), "--work", str(folder / "work")]
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", "--doubles", *places],
        # tests/gpu skips its tests where this is set.
        env={**os.environ, "PYTHON": sys.executable, "KVCACHED_LIBCUDA": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, results_of(folder / "out")


def results_of(out: Path) -> dict[str, dict[str, Any]]:
    steps = json.loads((out / "gpu-check.json").read_text())["steps"]
    return {step["name"]: step for step in steps}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsal")


@pytest.mark.sglang
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", [name for name in NAMES if name != "unpack"])
def test_a_step_passes_every_check_on_doubles(step: str, folder: Path) -> None:
    _, results = rehearsed(folder)
    assert results[step]["status"] == "passed", results[step]["reason"]
    assert set(results[step]["checks"].values()) == {"passed"}
    print(step, results[step]["seconds"])


@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_every_figure_comes_back(folder: Path) -> None:
    _, results = rehearsed(folder)
    found = {
        (step, name)
        for step, result in results.items()
        for name in result["facts"].get("figures", {})
    }
    assert found == set(BY_NAME)


@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_the_output_ends_with_a_line_for_each_step(folder: Path) -> None:
    done, results = rehearsed(folder)
    assert list(results) == NAMES
    lines = [line.split() for line in done.stdout.splitlines()[-len(NAMES) :]]
    assert [line[:2] for line in lines] == [[n, results[n]["status"]] for n in NAMES]
    assert done.returncode == 0
    assert {path.name for path in (folder / "out").iterdir()} == FILES


@pytest.fixture(scope="module")
def carried() -> Path:
    """Returns the folder that `gpu-day prepare` makes, for this Python."""
    version = "{}.{}".format(*sys.version_info)
    out = ROOT / "build" / "gpu-wheels"
    command = [ROOT / "scripts/gpu-wheels", "--python", version, "--out", out]
    subprocess.run(command, check=True)
    return out


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("visit", ["first", "second"])
def test_a_visit_is_rehearsed(visit: str, carried: Path, tmp_path: Path) -> None:
    """Unpacks and uses carried wheels. The results are few and small files."""
    out = tmp_path / "out"
    done = subprocess.run(
        [ROOT / "scripts/gpu-day", visit, "--out", out, "--", "--doubles"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    results = results_of(out)
    steps = plan.steps(carried=True, quick=visit == "first")
    assert list(results) == [step.name for step in steps]
    failed = {name: r["reason"] for name, r in results.items() if r["status"] != "passed"}
    assert (done.returncode, failed) == (0, {})
    assert results["unpack"]["checks"]["kvcached"] == "passed"
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {path.name for path in files} - {"compiled.tgz"} == FILES | {"machine.txt"}
    assert max(path.stat().st_size for path in files) < 16 * MIB
