"""What the agent's parts look at together: one event loop, no locks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prism.agent.models import Models
from prism.agent.pool import Pool
from prism.agent.running import RunningBook
from prism.agent.timing import Timing


@dataclass(frozen=True, slots=True)
class State:
    """now_s: monotonic clock."""

    pool: Pool
    timing: Timing = field(default_factory=Timing)
    now_s: Callable[[], float] = time.monotonic
    models: Models = field(default_factory=Models)
    running: RunningBook = field(default_factory=RunningBook)
