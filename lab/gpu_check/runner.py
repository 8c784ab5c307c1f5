"""Runner of steps. Each step has its own process group, which is killed when the step ends.

A step that hangs, crashes or writes an invalid result loses only its own result.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu_check import processes
from lab.gpu_check.driver import SEEN_GPU
from lab.gpu_check.plan import Step
from lab.gpu_check.report import (
    FAILED,
    LIMIT_VARIABLE,
    PASSED,
    ROOT,
    SKIPPED,
    UNFINISHED,
    end_of,
)
from prism.engines import cuda_toolkit

TRACE_S = 2.0
LOOK_S = 1.0
_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)
Result = dict[str, Any]
HOLD_DRIVER = """
import ctypes, os, sys, time
try:
    ctypes.CDLL(os.environ.get("KVCACHED_LIBCUDA", "libcuda.so.1")).cuInit(0)
except OSError:
    sys.exit()
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
time.sleep(7200)
"""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of a run."""

    out: Path  # results
    work: Path  # what steps build and leave for each other
    wheels: Path | None = None  # carried to this machine

    def log(self, step: Step) -> Path:
        return self.work / "logs" / f"{step.name}.log"

    def result(self, step: Step) -> Path:
        return self.work / "results" / f"{step.name}.json"

    def options(self) -> list[str]:
        """Returns the options that every step takes."""
        wheels = ["--wheels", str(self.wheels)] if self.wheels else []
        return ["--work", str(self.work), *wheels]


@dataclass(slots=True)
class Started:
    """Step whose process runs."""

    step: Step
    places: Places
    process: subprocess.Popen[bytes]
    limit_s: float
    began_s: float

    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.began_s)


def adopt_orphans() -> None:
    """Makes this process the parent of orphans, so that it can end them.

    SIGTERM raises SystemExit, so that the running step is ended and recorded before this process.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hold_driver() -> subprocess.Popen[bytes]:
    """Starts a process that keeps the driver initialised.

    Without persistence mode and without any client the driver unloads the GPU's state, and each
    step would pay seconds of cuInit.
    """
    return subprocess.Popen([sys.executable, "-c", HOLD_DRIVER], start_new_session=True)


def collect_garbage(places: Places) -> None:
    """Removes the ledgers of killed processes from /dev/shm, if kvcached was built."""
    code = "from kvcached.monitoring.segments import collect_garbage; collect_garbage()"
    command = [sys.executable, "-c", code]
    subprocess.run(
        command, env=environment(places, False), cwd=places.work, check=False, capture_output=True
    )


def start(step: Step, places: Places, limit_s: float, env: dict[str, str]) -> Started:
    """Starts the process of a step."""
    for path in (places.log(step), places.result(step)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    empty = places.work / "empty"  # -m looks for modules where it runs
    empty.mkdir(exist_ok=True)
    result = ("--result", str(places.result(step)))
    began_s = time.monotonic()
    with places.log(step).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", step.module, *places.options(), *result],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=empty,
            env={**env, LIMIT_VARIABLE: str(limit_s)},
            start_new_session=True,
        )
    with suppress(ProcessLookupError):
        # A core file of a process that maps a GPU is large and useless.
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
    return Started(step, places, process, limit_s, began_s)


def finish(started: Started, keep: set[int], look: Callable[[Result], None]) -> Result:
    """Waits for the step and returns its result. Nothing that the step does raises an error here.

    Args:
        keep: processes of other steps, which are not ended with this step's.
        look: called with the step's results so far, whenever they changed.
    """
    process = started.process
    try:
        ended = _wait(started, look)
    finally:
        end_all(process, keep)
    return _judge(started, process.returncode if ended else None)


def cut(started: Started, reason: str) -> Result:
    """Returns the result so far of a step that is ended from outside."""
    seconds = time.monotonic() - started.began_s
    found = _kept(_read(started.places.result(started.step)))
    return ended(started.step, FAILED, reason, seconds, found)


def _wait(started: Started, look: Callable[[Result], None]) -> bool:
    """Returns whether the step ended by itself. SIGABRT makes Python write the stack of every
    thread into the log."""
    process, seen = started.process, 0.0
    path = started.places.result(started.step)
    while (left_s := started.left_s()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(LOOK_S, left_s))
            return True
        changed = path.stat().st_mtime if path.exists() else 0.0
        if changed != seen:
            seen = changed
            look(cut(started, "not done yet") | {"status": UNFINISHED})
    if process.poll() is not None:
        return True
    processes.abort({process.pid, *processes.descendants(process.pid)})
    return False


def end_all(process: subprocess.Popen[bytes], keep: set[int]) -> None:
    """Kills the step's process group, and the processes that left it and were adopted.

    A process that the kernel holds in a driver call cannot be ended. It runs on during the next
    step.
    """
    _kill_group(process.pid)
    try:
        process.wait(TRACE_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} cannot be killed", file=sys.stderr)
    deadline_s = time.monotonic() + TRACE_S
    while (orphans := _children() - keep) and time.monotonic() < deadline_s:
        for pid in orphans:
            _kill(pid)
            _reap(pid)
        time.sleep(0.01)


def _children() -> set[int]:
    return {pid for pid, parent in processes.parents().items() if parent == os.getpid()}


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _judge(started: Started, code: int | None) -> Result:
    """Returns the step's own result, if its process ended as that says."""
    step, log = started.step, started.places.log(started.step)
    found = _read(started.places.result(step))
    kept, seconds = _kept(found), time.monotonic() - started.began_s
    status = found.get("status")
    if code is None:
        reason = f"not done after {started.limit_s:.0f} s"
    elif (status in (PASSED, SKIPPED) and code == 0) or (status == FAILED and code == 1):
        seconds = found.get("seconds", seconds) if step.in_background else seconds
        return ended(step, status, str(found.get("reason", "")), seconds, kept)
    else:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        what = "without its result" if found.get("status", UNFINISHED) == UNFINISHED else "wrongly"
        reason = f"{how}, {what}"
    return ended(step, FAILED, f"{reason}: {end_of(log)}", seconds, kept)


def _read(path: Path) -> Result:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _kept(found: Result) -> Result:
    return {name: found[name] for name in ("checks", "facts") if isinstance(found.get(name), dict)}


def ended(step: Step, status: str, reason: str, seconds: float, kept: Result) -> Result:
    return {
        "name": step.name,
        "status": status,
        "reason": reason,
        "seconds": round(seconds, 2),
        "checks": kept.get("checks", {}),
        "facts": kept.get("facts", {}),
    }


def environment(places: Places, seen_gpu: bool) -> dict[str, str]:
    """Returns the environment of the steps: the built kvcached comes first, then this checkout."""
    paths = [str(places.work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **cuda_toolkit.variables(),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **caches(places.work),
        SEEN_GPU: "1" if seen_gpu else "",
    }


def caches(work: Path) -> dict[str, str]:
    """Returns where compilers keep kernels, so that no step compiles what an earlier one has. The
    usual places need a home folder that can be written."""
    names = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "SGLANG_JIT_CACHE_DIR": "jit",
    }
    return {name: os.environ.get(name) or str(work / folder) for name, folder in names.items()}
