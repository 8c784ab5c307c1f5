"""Timing of the stages of an activation, and faults for tests.

PRISM_FAULT_STAGE names a stage; the process kills itself at its beginning. PRISM_FAULT_ONCE is a
file that the first fault creates; no fault happens while it exists.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

TOTAL = "total"
STAGE_VARIABLE = "PRISM_FAULT_STAGE"
ONCE_VARIABLE = "PRISM_FAULT_ONCE"


class Timeline:
    """Durations of stages. A stage lasts from its `enter` to the next `enter` or to `finish`.

    The times of a stage that recurs add up. Not thread-safe. `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._since_s = clock()
        self._stage: str | None = None
        self._stages_s: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        """Ends the current stage and begins this one."""
        now_s = self._clock()
        self._close(now_s)
        self._stage, self._since_s = stage, now_s
        _inject_fault(stage)

    def finish(self) -> dict[str, float]:
        """Returns the seconds of each stage in the order of their first `enter`, then "total"."""
        now_s = self._clock()
        self._close(now_s)
        self._stage = None
        return {**self._stages_s, TOTAL: now_s - self._began_s}

    def _close(self, now_s: float) -> None:
        if self._stage is not None:
            spent_s = now_s - self._since_s
            self._stages_s[self._stage] = self._stages_s.get(self._stage, 0.0) + spent_s


def _inject_fault(stage: str) -> None:
    """Kills this process if the environment asks for a fault in this stage."""
    if os.environ.get(STAGE_VARIABLE) == stage and claim_fault(os.environ.get(ONCE_VARIABLE)):
        os.kill(os.getpid(), signal.SIGKILL)


def claim_fault(once_file: str | None) -> bool:
    """Returns whether a fault may happen now. Creates `once_file`, which prevents further faults
    while it exists."""
    if once_file is None:
        return True
    try:
        os.close(os.open(once_file, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True
