"""Processes of this machine, read from /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


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


def _fields(pid: int) -> list[str]:
    """Returns the state of a process, its parent, and what follows in its `stat`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
