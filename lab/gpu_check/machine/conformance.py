"""Step "conformance": runs tests/gpu with tests/gpu/bare.ini, which needs no plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lab.gpu_check.driver import open_or_skip
from lab.gpu_check.kv import require_kvcached
from lab.gpu_check.machine.build import LENIENT_NAME
from lab.gpu_check.report import ROOT, Report, Skip, run_as_step

FOLDER = ROOT / "tests" / "gpu"


def main(arguments: list[str] | None = None) -> int:
    return run_as_step("conformance", __doc__, body, arguments)


def body(report: Report) -> None:
    require_kvcached()
    open_or_skip()
    if missing := [name for name in ("pytest", "hypothesis") if find_spec(name) is None]:
        raise Skip(f"pip install {' '.join(missing)}")
    file = report.work / "tests-gpu.xml"
    file.unlink(missing_ok=True)
    lenient = report.work / LENIENT_NAME
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", str(FOLDER / "bare.ini")),
            *("--rootdir", str(ROOT), "--confcutdir", str(ROOT)),
            *(f"--junitxml={file}", "--durations=8", str(FOLDER)),
        ],
        env={**os.environ, "CXX": str(lenient)} if lenient.exists() else None,
        check=False,
    )
    with report.check("tests"):
        outcome = outcome_of(file)
        report.fact(**outcome)
        if outcome["failed"]:
            raise RuntimeError(f"failed: {', '.join(outcome['failed'])}")
        if done.returncode or not outcome["passed"]:
            reasons = "; ".join(sorted(set(outcome["skipped"].values())))
            raise RuntimeError(
                f"pytest ended with {done.returncode}, {outcome['passed']} passed; {reasons}"
            )


def outcome_of(file: Path) -> dict[str, Any]:
    """Returns the tests of pytest's report by status. Raises RuntimeError if it is missing."""
    if not file.exists():
        raise RuntimeError("pytest did not write its report: see the log")
    passed, failed, skipped = 0, [], {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif skip is not None:
            skipped[name] = skip.get("message", "")
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


if __name__ == "__main__":
    sys.exit(main())
