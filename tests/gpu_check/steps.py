"""Steps of scripts/gpu-check for tests: run in a separate process, or their report alone."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.gpu_check import plan
from lab.gpu_check.report import Report
from lab.gpu_check.sizes import GIB, Sizes
from tests.kvcached.compiling import ROOT

LARGE = Sizes(70 * GIB, 60 * GIB)
MODULES = {step.name: step.module for step in plan.steps(carried=False, quick=False)}


def report_in(folder: Path, step: str) -> Report:
    """Returns the report of a step that works in a folder."""
    return Report(step, argparse.Namespace(result=None, work=folder, wheels=None))


def run(
    step: str, env: dict[str, str], folder: Path, before: str = "", *options: str
) -> dict[str, Any]:
    """Returns the result of a step. `before` is Python that runs in its process first."""
    result = folder / f"{step}.json"
    program = f"{before}\nimport sys\nfrom {MODULES[step]} import main\nsys.exit(main())"
    places = ("--work", str(folder / "work"), "--result", str(result))
    done = subprocess.run(
        [sys.executable, "-c", program, *places, *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.exists(), done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    assert done.returncode == (found["status"] == "failed"), done.stderr
    return found


def without_driver() -> dict[str, str]:
    """Returns the environment of a machine without a GPU. Other tests of this process name the
    double of the driver in theirs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED_")}
