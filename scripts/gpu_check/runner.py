"""Runs steps one after another, each in a process group of its own that nothing outlives.

A step that hangs, crashes or prints nonsense costs its own result and no other's. The total is
bounded: a step gets what is left of the budget at most, and none when too little is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu_check.driver import SEEN_GPU
from scripts.gpu_check.report import FAILED, LIMIT_VARIABLE, PASSED, ROOT, SKIPPED, UNFINISHED

LOG_TAIL_BYTES = 400
TRACE_S = 2.0
SHORTEST_STEP_S = 3.0
_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the report. After `limit_s` of wall-clock time its processes are killed."""

    name: str
    limit_s: float
    about: str
    module: str = ""

    @property
    def program(self) -> str:
        """What `python -m` runs."""
        return self.module or f"scripts.gpu_check.{self.name}"


@dataclass(frozen=True, slots=True)
class Places:
    """`out` receives the results, `work` what steps build and leave for each other."""

    out: Path
    work: Path
    wheels: Path | None = None

    def log(self, step: Step) -> Path:
        return self.work / "logs" / f"{step.name}.log"

    def result(self, step: Step) -> Path:
        return self.work / "results" / f"{step.name}.json"


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, and so can be found and ended.
    SIGTERM ends the running step before this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through `finally` in `run`
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(step: Step, places: Places, left_s: float, env: dict[str, str]) -> dict[str, Any]:
    """The step's result. Never raises for anything that the step does."""
    limit_s = min(step.limit_s, left_s)
    if limit_s < SHORTEST_STEP_S:
        return _ended(step, SKIPPED, "the time for all steps is used up", 0.0, {})
    for path in (places.log(step), places.result(step)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    empty = places.work / "empty"  # -m looks for modules where it runs
    empty.mkdir(exist_ok=True)
    began_s = time.monotonic()
    with places.log(step).open("wb") as log:
        process = subprocess.Popen(
            _command(step, places),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=empty,
            env={**env, LIMIT_VARIABLE: str(limit_s)},
            start_new_session=True,
        )
        # A core file of a process that maps a GPU is large and tells nobody anything.
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        try:
            ended = _wait(process, limit_s)
        finally:
            _end_all(process)
    seconds = time.monotonic() - began_s
    return _judge(step, places, seconds, process.returncode if ended else None, limit_s)


def _command(step: Step, places: Places) -> list[str]:
    wheels = ["--wheels", str(places.wheels)] if places.wheels else []
    return [
        *(sys.executable, "-X", "faulthandler", "-m", step.program),
        *("--out", str(places.out), "--work", str(places.work)),
        *("--result", str(places.result(step)), *wheels),
    ]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether it ended by itself. SIGABRT has Python write every thread's stack into the log."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        try:
            process.wait(TRACE_S)
        except subprocess.TimeoutExpired:
            print(f"process {process.pid} does not answer SIGABRT", file=sys.stderr)
        return False
    return True


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kills the step's process group, and whatever left it and was adopted.

    One that the kernel holds in a driver call cannot be ended: the next step goes on beside it.
    """
    _kill_group(process.pid)
    try:
        process.wait(TRACE_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} cannot be killed", file=sys.stderr)
    deadline_s = time.monotonic() + TRACE_S
    while (orphans := _children()) and time.monotonic() < deadline_s:
        for pid in orphans:
            _kill(pid)
        _reap()
        time.sleep(0.01)


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _judge(
    step: Step, places: Places, seconds: float, code: int | None, limit_s: float
) -> dict[str, Any]:
    """What the step wrote, if its process ended as its result says."""
    found = _read(places.result(step))
    kept = {name: found[name] for name in ("checks", "facts") if isinstance(found.get(name), dict)}
    if code is None:
        reason = f"not done after {limit_s:.0f} s"
    elif found.get("status") in (PASSED, SKIPPED) and code == 0:
        return _ended(step, found["status"], str(found.get("reason", "")), seconds, kept)
    elif found.get("status") == FAILED and code == 1:
        return _ended(step, FAILED, str(found.get("reason", "")), seconds, kept)
    else:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        what = "without its result" if found.get("status", UNFINISHED) == UNFINISHED else "wrongly"
        reason = f"{how}, {what}"
    return _ended(step, FAILED, f"{reason}: {_tail(places.log(step))}", seconds, kept)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(path: Path) -> str:
    """The end of a log, on one line, whatever bytes are in it."""
    content = path.read_bytes()[-LOG_TAIL_BYTES:] if path.exists() else b""
    text = content.decode(errors="replace").split()
    return " ".join(text) or "it printed nothing"


def _ended(
    step: Step, status: str, reason: str, seconds: float, kept: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": step.name,
        "status": status,
        "reason": reason,
        "seconds": round(seconds, 2),
        "checks": kept.get("checks", {}),
        "facts": kept.get("facts", {}),
    }


def environment(places: Places, seen_gpu: bool) -> dict[str, str]:
    """For the steps' processes: the built kvcached first, then this checkout."""
    paths = [str(places.work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(places.work / "triton"),
        SEEN_GPU: "1" if seen_gpu else "",
    }
