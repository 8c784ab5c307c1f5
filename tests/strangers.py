"""Another user of the machine, for tests of permissions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

NOBODY = 65534
UNEXPECTED = 99
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def as_nobody(act: Callable[[], bool]) -> bool:
    """Returns the result of `act` in a process of another user. `act` may import nothing."""
    pid = os.fork()
    if pid == 0:
        code = UNEXPECTED
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            code = int(act())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != UNEXPECTED
    return bool(status)


def give_to_nobody(path: Path) -> Path:
    os.chown(path, NOBODY, NOBODY)
    return path
