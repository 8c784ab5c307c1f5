"""Sends reports: each interval, after changes, and before every answer to an order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prism.agent.scheduler_link import SchedulerLink
from prism.messages import ActionResult, AgentReport

# Changes that come together are reported together.
SETTLE_S = 0.01


class Reporter:
    """`build` makes a report of the present state."""

    def __init__(
        self, link: SchedulerLink, build: Callable[[], AgentReport], interval_s: float
    ) -> None:
        self._link = link
        self._build = build
        self._interval_s = interval_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    def answer(self, result: ActionResult) -> None:
        """The report goes first: plans are made on reports, so it must not lag behind."""
        self._link.send(self._build())
        self._link.send(result)

    async def run(self) -> None:
        while True:
            self._changed.clear()
            self._link.send(self._build())
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(SETTLE_S)
