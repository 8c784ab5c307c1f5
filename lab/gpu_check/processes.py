"""Processes of this machine, read from /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

TRACE_S = 2.0
_LOOK_S = 0.01


def parents() -> dict[int, int]:
    """Returns the parent of each process. Not every kernel (gVisor) lists a task's children."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found[int(path.name)] = int(_fields(int(path.name))[1])
    return found


def descendants(pid: int) -> set[int]:
    """Returns the children of a process, their children, and so on."""
    parent_of = parents()
    found, new = set[int](), {pid}
    while new := {child for child, parent in parent_of.items() if parent in new} - found:
        found |= new
    return found


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        return _fields(pid)[0] != "Z"
    except OSError:
        return False


def abort(pids: Collection[int]) -> None:
    """Ends processes. Python with PYTHONFAULTHANDLER writes the stacks of its threads first.

    Processes may share a log, so that one after another writes while all others are stopped.
    """
    _signal(pids, signal.SIGSTOP)
    for pid in sorted(pids, reverse=True):  # children first, since a parent's death may kill them
        _signal([pid], signal.SIGABRT)
        _signal([pid], signal.SIGCONT)
        until_s = time.monotonic() + TRACE_S / len(pids)
        while is_alive(pid) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
    _signal(pids, signal.SIGKILL)


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _fields(pid: int) -> list[str]:
    """Returns the state of a process, its parent, and what follows in its `stat`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
