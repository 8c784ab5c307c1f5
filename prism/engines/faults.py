"""Faults that tests order through the environment: an engine that dies in a stage it names.

PRISM_FAULT_STAGE: the stage at whose beginning the process kills itself.
PRISM_FAULT_ONCE: a file that the first fault creates; no fault happens while it exists.
Neither is set outside of tests.
"""

from __future__ import annotations

import os
import signal

STAGE_VARIABLE = "PRISM_FAULT_STAGE"
ONCE_VARIABLE = "PRISM_FAULT_ONCE"


def reached(stage: str) -> None:
    """SIGKILL to itself if this is the stage to die in."""
    if os.environ.get(STAGE_VARIABLE) == stage and claim(os.environ.get(ONCE_VARIABLE)):
        os.kill(os.getpid(), signal.SIGKILL)


def claim(once_file: str | None) -> bool:
    """Whether a fault may happen now; it is the last one while `once_file` exists."""
    if once_file is None:
        return True
    try:
        os.close(os.open(once_file, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True
