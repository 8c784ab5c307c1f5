"""Which frontends are alive: one whose heartbeat is gone gets no output, and wants none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prism.agent.state import State
from prism.errors import QueueUnavailableError
from prism.queueing import RequestQueue

log = logging.getLogger(__name__)


class FrontendWatch:
    """known: ids that matter here. on_dead: called once per frontend that is gone."""

    def __init__(
        self,
        state: State,
        queue: RequestQueue,
        known: Callable[[], set[str]],
        on_dead: Callable[[str], None],
    ) -> None:
        self._timing = state.timing
        self._now_s = state.now_s
        self._queue = queue
        self._known = known
        self._on_dead = on_dead
        self._missing_since_s: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._timing.frontend_check_s)
            try:
                await self._check()
            except QueueUnavailableError:
                # Heartbeats cannot arrive either, so what is missing afterwards counts anew.
                self._missing_since_s.clear()

    async def _check(self) -> None:
        known = sorted(self._known())
        alive = await self._queue.live_frontends(known)
        now_s = self._now_s()
        missing = {name: self._missing_since_s.get(name, now_s) for name in known}
        self._missing_since_s = {n: since for n, since in missing.items() if n not in alive}
        for name, since_s in list(self._missing_since_s.items()):
            if now_s - since_s >= self._timing.frontend_missing_s:
                log.warning("frontend %s is gone: its requests are cancelled", name)
                del self._missing_since_s[name]
                self._on_dead(name)
