"""Detects open requests that the queue no longer has: their result was lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.request_log import OpenRequest, RequestLog
from prism.queueing.request_queue import RequestQueue

# A request is checked when it had no output for SILENT_S. It is lost if two checks in a row do not
# find it, without output in between: its last output may arrive after Redis has removed it.
SILENT_S = 5.0
CHECK_S = 1.0

log = logging.getLogger(__name__)


class LostRequestWatch:
    """Comparison of the log with the queue. For one event loop.

    A suspended frontend, a full socket, or data lost by Redis can lose a request's result. Without
    this watch, the request would fail only after `frontend.progress_timeout`.

    `on_lost` is called for each request that is open here and neither waits nor runs anywhere.
    """

    def __init__(
        self,
        requests: RequestLog,
        queue: RequestQueue,
        on_lost: Callable[[OpenRequest], None],
    ) -> None:
        self._requests = requests
        self._queue = queue
        self._on_lost = on_lost
        # Request id -> time of its last progress, for requests missing at the last check.
        self._missed: dict[str, float] = {}

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.look(time.monotonic())
            except QueueUnavailableError as error:
                log.debug("%s", error)

    async def look(self, now_s: float) -> None:
        """Checks the silent requests once. Raises QueueUnavailableError."""
        silent = [
            (entry, entry.progress_s, entry.request.attempt)
            for entry in self._requests.unended()
            if entry.enqueued and now_s - entry.progress_s >= SILENT_S
        ]
        attempts = await self._queue.open_attempts([entry.request.id for entry, *_ in silent])
        missed: dict[str, float] = {}
        for entry, progress_s, attempt in silent:
            request_id = entry.request.id
            changed = entry.ended or not entry.enqueued or entry.progress_s != progress_s
            if attempts.get(request_id, 0) >= attempt or changed:
                continue
            if self._requests.get(request_id) is not entry:
                continue
            if self._missed.get(request_id) == progress_s:
                self._on_lost(entry)
            else:
                missed[request_id] = progress_s
        self._missed = missed
