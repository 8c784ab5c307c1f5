"""scripts/gpu-check from end to end on doubles, build and SGLang included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.rehearsal import environment
from tests.gpu_check.test_steps import run
from tests.kvcached.compiling import ROOT

STEPS = ["facts", "build", "probe", "conformance", "graphs", "benches", "models", "fork"]
STEPS += ["engine", "line"]


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_sglang_serves_two_models_in_turn_on_doubles(tmp_path: Path) -> None:
    found = run("engine", environment(), tmp_path)
    assert found["status"] == "passed", found["reason"]
    assert set(found["checks"].values()) == {"passed"}
    rounds = found["facts"]["rounds"]
    assert [r["model"] for r in rounds] == ["llama", "qwen2"] * 2
    assert [r["from_store"] for r in rounds] == [False, False, True, True]
    assert len(found["facts"]["activation_s"]) == 2
    assert all(r["captures_s"] for r in rounds)
    assert set(found["facts"]["tokens"]) == {
        "llama",
        "llama, with graphs",
        "qwen2",
        "qwen2, with graphs",
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_ten_steps_pass_on_doubles(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(str(ROOT / "scripts/gpu-check"), "--time-factor", "6"),
            *("--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")),
        ],
        env={**environment(), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    steps = json.loads((tmp_path / "out/gpu-check.json").read_text())["steps"]
    failed = {step["name"]: step["reason"] for step in steps if step["status"] != "passed"}
    assert (done.returncode, failed) == (0, {})
    assert [step["name"] for step in steps] == STEPS
    row = (tmp_path / "out/gpu-check-line.md").read_text().strip()
    assert done.stdout.splitlines()[-1 - len(STEPS)] == row
    assert [line.split()[0] for line in done.stdout.splitlines()[-len(STEPS) :]] == STEPS
    assert "?" not in row
    names = ("gpu-check.json", "gpu-check.log", "gpu-check-line.md")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)
