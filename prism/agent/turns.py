"""The loop that gives `Serving` its turns."""

from __future__ import annotations

import asyncio
import logging

from prism.agent.lease import Lease
from prism.agent.serving import Serving
from prism.agent.timing import Timing
from prism.errors import LeaseLostError, QueueUnavailableError

log = logging.getLogger(__name__)

# The order is computed at most this often; what arrives meanwhile is ordered together.
PAUSE_S = 0.002
# Without news: deadlines pass, and memory may have come free.
WAITING_S = 0.05
IDLE_S = 1.0


class Turns:
    """A turn follows every `wake`."""

    def __init__(self, lease: Lease, timing: Timing) -> None:
        self._lease = lease
        self._timing = timing
        self._news = asyncio.Event()
        self._down = False

    def wake(self) -> None:
        self._news.set()

    async def run(self, serving: Serving) -> None:
        """Raises LeaseLostError when another agent has the queue."""
        while True:
            await self._wait(WAITING_S if serving.has_waiting else IDLE_S)
            self._news.clear()
            await self.turn(serving)
            await asyncio.sleep(PAUSE_S)

    async def turn(self, serving: Serving) -> None:
        epoch = self._lease.epoch
        try:
            await serving.turn(epoch)
            self._down = False
        except QueueUnavailableError as error:
            log.log(logging.DEBUG if self._down else logging.WARNING, "%s", error)
            self._down = True
            await asyncio.sleep(self._timing.retry_s)
            self.wake()
        except LeaseLostError:
            await self._lease.retake(epoch)
            self.wake()

    async def _wait(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self._news.wait()
        except TimeoutError:
            return
