"""Checks a machine with a GPU in one command of less than ten minutes, without network.

    scripts/gpu-check [--out DIR] [--work DIR] [--wheels FOLDER] [--steps LIST] [--time-factor N]

Needs Python 3.11 or later with torch (CUDA), numpy, pytest, hypothesis, cmake, ninja, nanobind,
scikit-build-core and a C++20 compiler; transformers and Triton for the steps that use them. Each
step runs in a process of its own under a time limit; one that hangs or crashes never stops the
next. A line of JSON for each on stdout: name, status (passed, failed, skipped), reason, seconds,
checks, facts. DIR (default build/gpu-check) gets gpu-check.json, gpu-check.log and
gpu-check-line.md, the line for docs/gpu-results.md; what is built lies elsewhere. The output ends
with a short line for each step. Exit code 1 if any step failed.

Steps, in order:
{steps}
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.gpu_check import runner
from scripts.gpu_check.report import DEFAULT_OUT, DEFAULT_WORK, FAILED, PASSED
from scripts.gpu_check.runner import Places, Step

BUDGET_S = 550.0  # machines are lent for commands of ten minutes
LAST_S = 10.0  # kept for the last step, which only reads what the others found
LOG_BYTES = 1 << 20
REASON_LENGTH = 300  # of a short line

STEPS = (
    Step("facts", 100, "driver, GPU, compilers, packages, limits, commit"),
    Step("build", 150, "kvcached and prism, installed into a folder of their own"),
    Step("probe", 60, "what the driver grants and refuses, and what each call costs"),
    Step("conformance", 120, "tests/gpu"),
    Step("graphs", 60, "CUDA graphs and fences over pages that come and go"),
    Step("benches", 120, "map and unmap, weights, decode attention over two layouts"),
    Step("models", 90, "two models in turn through store, links and arena; a killed process"),
    Step("fork", 40, "preload, fork, CUDA in the child"),
    Step("engine", 260, "SGLang serves a model (with --wheels)"),
    Step("line", LAST_S, "the line for docs/gpu-results.md"),
)
"""Their limits add up to more than the budget: no step is expected to need its own."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parse(arguments)
    chosen = _chosen(options.steps)
    out = options.out.resolve()
    work, wheels = options.work.resolve(), options.wheels and options.wheels.resolve()
    places = Places(out, work, wheels)
    out.mkdir(parents=True, exist_ok=True)
    places.work.mkdir(parents=True, exist_ok=True)
    runner.adopt_orphans()
    factor = options.time_factor
    stretched = [replace(step, limit_s=factor * step.limit_s) for step in chosen]
    results = run_steps(stretched, places, factor * BUDGET_S)
    print("\n".join(map(short, results)), flush=True)
    return 1 if any(result["status"] == FAILED for result in results) else 0


def run_steps(steps: list[Step], places: Places, budget_s: float) -> list[dict[str, Any]]:
    """The results of all, written to `out` after each step."""
    deadline_s = time.monotonic() + budget_s
    results: list[dict[str, Any]] = []
    for step in steps:
        left_s = deadline_s - time.monotonic() - (0 if step.name == "line" else LAST_S)
        result = runner.run(step, places, left_s, runner.environment(places, saw_gpu(results)))
        results.append(result)
        print(json.dumps(result), flush=True)
        (places.out / "gpu-check.json").write_text(json.dumps({"steps": results}, indent=1) + "\n")
        _append_log(step, places, is_first=len(results) == 1)
    line = places.out / "gpu-check-line.md"
    if any(step.name == "line" for step in steps) and line.exists():
        print(line.read_text().strip(), flush=True)
    return results


def saw_gpu(results: list[dict[str, Any]]) -> bool:
    """Whether the first step found a GPU, whatever else it lacked."""
    return any(r["name"] == "facts" and r["checks"].get("driver") == PASSED for r in results)


def short(result: dict[str, Any]) -> str:
    """One line: of a long output only the end may come back from a machine."""
    reason = " ".join(result["reason"].split())[:REASON_LENGTH]
    return f"{result['name']:12} {result['status']:8} {result['seconds']:7.2f} s  {reason}".rstrip()


def _append_log(step: Step, places: Places, *, is_first: bool) -> None:
    """The end of the step's log. All in one file: few files may come back from a machine."""
    log = places.log(step)
    content = log.read_bytes()[-LOG_BYTES:] if log.exists() else b""
    with (places.out / "gpu-check.log").open("wb" if is_first else "ab") as file:
        file.write(f"==== {step.name}\n".encode() + content + b"\n")


def _chosen(text: str) -> list[Step]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = set(wanted) - {step.name for step in STEPS}
    if unknown:
        names = ", ".join(step.name for step in STEPS)
        missing = ", ".join(sorted(unknown))
        print(f"gpu-check: no step {missing}; there are: {names}", file=sys.stderr)
        raise SystemExit(2)
    return [step for step in STEPS if not wanted or step.name in wanted]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    lines = [f"  {step.name:12} {step.about} ({step.limit_s:.0f} s at most)" for step in STEPS]
    about = (__doc__ or "").format(steps="\n".join(lines))
    parser = argparse.ArgumentParser(prog="gpu-check", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the folder of the results")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="for what is built")
    parser.add_argument("--wheels", type=Path, help="a folder that scripts/gpu-wheels made")
    parser.add_argument("--steps", default="", help="names, with commas between them")
    parser.add_argument(
        "--time-factor", type=float, default=1.0, help="stretches all time limits: few cores, say"
    )
    options = parser.parse_args(arguments)
    if options.wheels and not options.wheels.is_dir():
        parser.error(f"--wheels: there is no folder {options.wheels}")
    if not 0 < options.time_factor <= 100:
        parser.error("--time-factor must be above 0, and 100 at most")
    return options


if __name__ == "__main__":
    sys.exit(main())
