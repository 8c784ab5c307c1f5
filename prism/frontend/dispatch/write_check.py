"""Checks for probes whether Redis takes requests."""

from __future__ import annotations

import asyncio
import time

from prism.errors import QueueUnavailableError
from prism.queueing.request_queue import RequestQueue

_FRESH_S = 1.0  # validity of a successful write
_POLLS, _POLL_S = 10, 0.1


class WriteCheck:
    """Check of Redis by a small write, shared by all probes: one write at a time, whose success is
    valid for _FRESH_S. For one event loop."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._asked: asyncio.Task[str] | None = None
        self._asked_s = 0.0

    async def failure(self) -> str:
        """Returns why Redis takes no requests, or an empty string. Takes at most about a second."""
        now_s = time.monotonic()
        if self._asked is None or self._is_stale(now_s):
            self._asked, self._asked_s = asyncio.create_task(self._write()), now_s
        # Not cancelled: a paused server answers once it resumes, and a silent one times out. A
        # stall of this process counts as one poll.
        for _ in range(_POLLS):
            await asyncio.wait([self._asked], timeout=_POLL_S)
            if self._asked.done():
                return self._asked.result()
        return "Redis takes no writes: it does not answer them"

    def _is_stale(self, now_s: float) -> bool:
        """Returns whether to write again. A failure is stale at once, so that the next probe sees a
        recovery."""
        if self._asked is None or not self._asked.done():
            return False
        return bool(self._asked.result()) or now_s - self._asked_s >= _FRESH_S

    async def _write(self) -> str:
        try:
            await self._queue.check_writable()
        except QueueUnavailableError as error:
            return str(error)
        return ""

    async def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
