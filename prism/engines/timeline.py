"""The stages of an activation, as they pass.

Tests end an engine in one of them. PRISM_FAULT_STAGE names the stage at whose beginning the process
kills itself. PRISM_FAULT_ONCE is a file that the first fault creates; there is no fault while it
exists.
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
    """A stage lasts from the `enter` that names it to the next one, or to `finish`.

    Stages may recur; their times add up. Not thread-safe. `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._since_s = clock()
        self._stage: str | None = None
        self._stages_s: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        """Close the stage that runs, and begin this one."""
        now_s = self._clock()
        self._close(now_s)
        self._stage, self._since_s = stage, now_s
        _die_if_told(stage)

    def finish(self) -> dict[str, float]:
        """Seconds of each stage in the order of their first `enter`, then "total"."""
        now_s = self._clock()
        self._close(now_s)
        self._stage = None
        return {**self._stages_s, TOTAL: now_s - self._began_s}

    def _close(self, now_s: float) -> None:
        if self._stage is not None:
            spent_s = now_s - self._since_s
            self._stages_s[self._stage] = self._stages_s.get(self._stage, 0.0) + spent_s


def _die_if_told(stage: str) -> None:
    """SIGKILL to itself if this is the stage to die in."""
    if os.environ.get(STAGE_VARIABLE) == stage and claim_fault(os.environ.get(ONCE_VARIABLE)):
        os.kill(os.getpid(), signal.SIGKILL)


def claim_fault(once_file: str | None) -> bool:
    """Whether a fault may happen now; it is the last one while `once_file` exists."""
    if once_file is None:
        return True
    try:
        os.close(os.open(once_file, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True
