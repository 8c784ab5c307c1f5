"""Checks a machine with a GPU in one command of less than ten minutes, without network.

    scripts/gpu-check                                  all steps
    scripts/gpu-check --wheels build/gpu-wheels        with SGLang from carried wheels
    scripts/gpu-check --quick --budget 230             short forms of the steps, to find faults
    scripts/gpu-check --steps facts,build,probe        some of them
    scripts/gpu-check --doubles                        without a GPU: a rehearsal on the doubles

Needs Python 3.11 or later with torch (CUDA), numpy, pytest, hypothesis, cmake, ninja, nanobind,
scikit-build-core, hatchling (or wheels that hold it) and a C++20 compiler; transformers and Triton
for the steps that use them. Each step runs in a separate process under a time limit. A step that
hangs or crashes never stops the next. A step that does not fit into the rest of the budget is left
out and named.

--out (default build/gpu-check) gets gpu-check.json, which has the results so far at every moment,
gpu-check.log, and gpu-check.md with the tables for docs/gpu-results.md. The output ends with the
figures and a short line for each step. Exit code 1 if a step failed, 2 for wrong options and for a
budget that no step fits.

Steps, in order, with their limits in seconds:
{steps}
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from lab.gpu_check import figures, plan, results, runner, wheels
from lab.gpu_check.plan import Step
from lab.gpu_check.report import (
    DEFAULT_WORK,
    FACTOR_VARIABLE,
    FAILED,
    PASSED,
    QUICK_VARIABLE,
    ROOT,
    SKIPPED,
)
from lab.gpu_check.runner import Places, Result, Started
from lab.gpu_check.sizes import SHM, store_name

BUDGET_S = 550.0  # machines are lent for commands of ten minutes
SHORTEST_BUDGET_S, LONGEST_BUDGET_S = 1.0, 86400.0
DOUBLES_FACTOR = 8.0  # doubles interpret kernels
LOG_BYTES = 1 << 20
REASON_LENGTH = 300  # of a short line
# Not the folder of what is built, since few files may come back of this one.
DEFAULT_OUT = ROOT / "build" / "gpu-check"
EVERY_STEP = plan.steps(carried=False, quick=False)


def main(arguments: list[str] | None = None) -> int:
    """Runs the steps. Returns the exit code."""
    options = _parse(arguments)
    places = Places(options.out.resolve(), options.work.resolve(), options.wheels)
    for folder in (places.out, places.work):
        folder.mkdir(parents=True, exist_ok=True)
    if options.doubles:
        from lab.gpu_check import rehearsal

        doubles = rehearsal.environment()
        os.environ.clear()  # a variable that the rehearsal leaves out must not stay
        os.environ.update(doubles)
    os.environ[FACTOR_VARIABLE] = str(options.time_factor)
    os.environ[QUICK_VARIABLE] = "1" if options.quick else ""
    runner.adopt_orphans()
    holder = runner.hold_driver()
    try:
        run = Run(places, options.time_factor * options.budget, {holder.pid})
        run.all([step.stretched(options.time_factor) for step in _chosen(options)])
    finally:
        holder.kill()
        holder.wait()
        shutil.rmtree(SHM / store_name(places.work), ignore_errors=True)
        runner.collect_garbage(places)
    return run.conclude()


class Run:
    """Steps of one command, and their results, which are written to `out` at every moment."""

    def __init__(self, places: Places, budget_s: float, keep: set[int]) -> None:
        self.results: list[Result] = []
        self._places = places
        self._budget_s = budget_s
        self._deadline_s = time.monotonic() + budget_s
        self._keep = keep
        self._background: dict[str, Started] = {}
        self._log_mode = "wb"

    def all(self, steps: list[Step]) -> None:
        """Runs the steps in order, after starting those of the background."""
        try:
            for step in steps:
                if step.in_background and step.needs_s <= self.left_s():
                    self._background[step.name] = self._start(step)
                    self._keep.add(self._background[step.name].process.pid)
            for step in steps:
                self._one(step)
        finally:
            for started in self._background.values():
                runner.end_all(started.process, self._keep - {started.process.pid})

    def left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def conclude(self) -> int:
        """Prints figures and short lines. Returns the exit code."""
        (self._places.out / results.FILE).write_text(results.markdown(self.results))
        for result in self.results:
            for name, found in result["facts"].get("figures", {}).items():
                print(f"{result['name']:12} {figures.line(name, found)}")
        print("\n" + "\n".join(map(short, self.results)), flush=True)
        if all(result["seconds"] == 0 for result in self.results):
            shortest_s = min(step.needs_s for step in EVERY_STEP)
            print(
                f"gpu-check: no step fits --budget {self._budget_s:g}; give {shortest_s:g} or more"
            )
            return 2
        return 1 if any(result["status"] == FAILED for result in self.results) else 0

    def _one(self, step: Step) -> None:
        started = self._background.pop(step.name, None)
        left_s = self.left_s()
        if started is None and left_s < step.needs_s:
            reason = f"left out: it needs {step.needs_s:.0f} s, and {left_s:.0f} s of"
            reason += f" --budget {self._budget_s:.0f} are left"
            self._record(step, runner.ended(step, SKIPPED, reason, 0.0, {}))
            return
        print(f"-- {step.name}: {step.about} ({left_s:.0f} s left)", flush=True)
        started = started or self._start(step)
        try:
            result = runner.finish(started, self._keep, self._write)
        except SystemExit:
            self._record(step, runner.cut(started, "cut off by SIGTERM"))
            raise
        self._keep.discard(started.process.pid)
        self._record(step, result)

    def _start(self, step: Step) -> Started:
        env = runner.environment(self._places, saw_gpu(self.results))
        return runner.start(step, self._places, min(step.limit_s, self.left_s()), env)

    def _record(self, step: Step, result: Result) -> None:
        self.results.append(result)
        self._write()
        print(short(result), flush=True)
        log = self._places.log(step)
        content = log.read_bytes()[-LOG_BYTES:] if log.exists() else b""
        with (self._places.out / "gpu-check.log").open(self._log_mode) as file:
            file.write(f"==== {step.name}\n".encode() + content + b"\n")
        self._log_mode = "ab"

    def _write(self, *unfinished: Result) -> None:
        path = self._places.out / "gpu-check.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({"steps": [*self.results, *unfinished]}, indent=1) + "\n")
        os.replace(partial, path)


def saw_gpu(found: list[Result]) -> bool:
    """Returns whether the step "facts" found a GPU, also if another of its checks failed."""
    return any(r["name"] == "facts" and r["checks"].get("driver") == PASSED for r in found)


def short(result: Result) -> str:
    """Returns one line of bounded length, since a terminal may show only the end of the output."""
    reason = " ".join(result["reason"].split())[:REASON_LENGTH]
    return f"{result['name']:12} {result['status']:8} {result['seconds']:7.2f} s  {reason}".rstrip()


def _chosen(options: argparse.Namespace) -> list[Step]:
    wanted = [name.strip() for name in options.steps.split(",") if name.strip()]
    unknown = set(wanted) - {step.name for step in EVERY_STEP}
    if unknown:
        names = ", ".join(step.name for step in EVERY_STEP)
        text = f"gpu-check: {', '.join(sorted(unknown))} is not a step; steps: {names}"
        print(text, file=sys.stderr)
        raise SystemExit(2)
    steps = plan.steps(carried=wheels.hold_this_checkout(options.wheels), quick=options.quick)
    return [step for step in steps if not wanted or step.name in wanted]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    lines = [f"  {step.name:12} {step.limit_s:4.0f}  {step.about}" for step in EVERY_STEP]
    about = (__doc__ or "").format(steps="\n".join(lines))
    parser = argparse.ArgumentParser(prog="gpu-check", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the results")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of what is built")
    parser.add_argument("--wheels", type=Path, help="folder that scripts/gpu-wheels made")
    parser.add_argument("--steps", default="", help="names, separated by commas")
    parser.add_argument("--quick", action="store_true", help="short forms of the steps")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for all steps"
    )
    parser.add_argument(
        "--time-factor", type=float, help="multiplies all time limits, for a slow machine"
    )
    parser.add_argument("--doubles", action="store_true", help="on the doubles, without a GPU")
    options = parser.parse_args(arguments)
    if options.wheels:
        if not options.wheels.is_dir():
            parser.error(f"--wheels: {options.wheels} is not a folder")
        options.wheels = options.wheels.resolve()
    if options.time_factor is None:
        options.time_factor = DOUBLES_FACTOR if options.doubles else 1.0
    if not 0 < options.time_factor <= 100:
        parser.error("--time-factor must be above 0, and 100 at most")
    if not SHORTEST_BUDGET_S <= options.budget <= LONGEST_BUDGET_S:
        parser.error(f"--budget must be {SHORTEST_BUDGET_S:g} to {LONGEST_BUDGET_S:g} seconds")
    return options


if __name__ == "__main__":
    sys.exit(main())
