"""Report of a step: facts, figures, checks that passed, failed or were skipped, and its end.

A step is a module with `main`, which calls `run_as_step`. It can run alone:

    python -m lab.gpu_check.memory.probe [--work DIR] [--wheels FOLDER]

prints its result as JSON and exits with 1 if a check failed. Every fact is written to the result
file at once, so that a step which hangs or crashes later keeps it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.gpu_check.figures import figure

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_WORK = ROOT / "build" / "gpu-check-work"
LIMIT_VARIABLE = "PRISM_GPU_CHECK_LIMIT_S"
QUICK_VARIABLE = "PRISM_GPU_CHECK_QUICK"
FACTOR_VARIABLE = "PRISM_GPU_CHECK_TIME_FACTOR"
DOUBLES_VARIABLE = "PRISM_GPU_CHECK_DOUBLES"

LOG_END_BYTES = 400
PASSED, FAILED, SKIPPED, UNFINISHED = "passed", "failed", "skipped", "unfinished"


class Skip(Exception):
    """Reason why something cannot be checked here."""


def is_quick() -> bool:
    """Returns whether this run only looks for faults, with fewer repetitions."""
    return bool(os.environ.get(QUICK_VARIABLE))


def on_doubles() -> bool:
    """Returns whether doubles replace the GPU, so that times mean nothing."""
    return bool(os.environ.get(DOUBLES_VARIABLE))


def stretched(seconds: float) -> float:
    """Returns a time limit, multiplied by --time-factor."""
    return seconds * float(os.environ.get(FACTOR_VARIABLE) or 1)


def end_of(log: Path) -> str:
    """Returns the end of a log on one line, whatever bytes are in it."""
    content = log.read_bytes()[-LOG_END_BYTES:] if log.exists() else b""
    return " ".join(content.decode(errors="replace").split()) or "it printed nothing"


class Report:
    """Facts, figures and checks of one step."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.facts: dict[str, Any] = {}
        self.checks: dict[str, str] = {}
        self._file: Path | None = options.result
        self._began_s = time.monotonic()

    @property
    def work(self) -> Path:
        """Folder of files that steps leave for each other, in addition to the results."""
        work: Path = self.options.work
        work.mkdir(parents=True, exist_ok=True)
        return work

    def left_s(self, default_s: float) -> float:
        """Returns the rest of the runner's time limit, or of `default_s` without a runner."""
        limit_s = float(os.environ.get(LIMIT_VARIABLE) or default_s)
        return limit_s - (time.monotonic() - self._began_s)

    def fact(self, **values: Any) -> None:
        """Records facts by name: numbers, strings, lists and dicts of them."""
        self.facts.update(values)
        self._write(UNFINISHED, "")

    def figure(self, name: str, value: float, reference: float | None = None) -> None:
        """Records a figure of `lab.gpu_check.expected`, with the reference of the same run."""
        found = figure(self.name, name, value, reference, judged=not on_doubles())
        self.facts.setdefault("figures", {})[name] = found
        self._write(UNFINISHED, "")

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Runs a block as a check. An error in it fails the check, and the step continues."""
        print(f"-- {self.name}: {name}", flush=True)
        try:
            yield
        except Skip as reason:
            self.checks[name] = f"{SKIPPED}: {reason}"
        except Exception as error:  # noqa: BLE001 - the next check has to run after any error
            traceback.print_exc()
            self.checks[name] = f"{FAILED}: {type(error).__name__}: {error}"
        else:
            self.checks[name] = PASSED
        self._write(UNFINISHED, "")

    def skip(self, reason: object) -> None:
        """Records that the step cannot check anything on this machine."""
        self.checks[self.name] = f"{SKIPPED}: {reason}"

    def conclude(self) -> dict[str, Any]:
        """Returns the step's result, from its checks."""
        failed = {n: v for n, v in self.checks.items() if v.startswith(FAILED)}
        skipped = {n: v for n, v in self.checks.items() if v.startswith(SKIPPED)}
        if failed:
            status, why = FAILED, failed
        elif len(skipped) < len(self.checks):
            status, why = PASSED, skipped
        elif skipped:
            status, why = SKIPPED, skipped
        else:
            status, why = FAILED, {self.name: "failed: it checked nothing"}
        return self._write(status, "; ".join(f"{n} {v}" for n, v in why.items()))

    def _write(self, status: str, reason: str) -> dict[str, Any]:
        result = {
            "name": self.name,
            "status": status,
            "reason": reason,
            "seconds": round(time.monotonic() - self._began_s, 2),
            "checks": self.checks,
            "facts": self.facts,
        }
        if self._file is not None:
            partial = self._file.with_suffix(".part")
            partial.write_text(json.dumps(result, default=str))
            os.replace(partial, self._file)
        return result


def options_of(about: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options that every step takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder of what is built")
    parser.add_argument("--wheels", type=Path, help="folder of wheels with SGLang")
    parser.add_argument("--result", type=Path, help="file for the result as JSON")
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    options.wheels = options.wheels and options.wheels.resolve()
    return options


def _die_with_parent() -> None:
    """Has the kernel kill this step when its runner dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def run_as_step(
    name: str,
    about: str | None,
    body: Callable[[Report], None],
    arguments: list[str] | None = None,
) -> int:
    """Runs a step in this process. Returns its exit code: 1 if a check failed."""
    options = options_of(about, arguments)
    if options.result is not None:
        _die_with_parent()
    report = Report(name, options)
    try:
        body(report)
    except Skip as reason:
        report.skip(reason)
    except Exception as error:  # noqa: BLE001 - the result names any error
        traceback.print_exc()
        report.checks[name] = f"{FAILED}: {type(error).__name__}: {error}"
    result = report.conclude()
    if options.result is None:
        print(json.dumps(result, indent=1, default=str))
    sys.stdout.flush()
    return 1 if result["status"] == FAILED else 0
