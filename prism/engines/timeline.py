"""The stages of an activation, as they pass."""

from __future__ import annotations

import time
from collections.abc import Callable

from prism.engines import faults

TOTAL = "total"


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
        faults.reached(stage)

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
