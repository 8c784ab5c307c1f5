"""Finds open requests whose end was lost on its way: the queue has them no more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prism.errors import QueueUnavailableError
from prism.frontend.request_log import OpenRequest, RequestLog
from prism.queueing.requests import RequestQueue

# A request is looked for when nothing came of it for so long. Two looks that miss it, with no
# output between them, make it lost: its last output may arrive after Redis has heard of its end.
SILENT_S = 5.0
LOOK_S = 1.0

log = logging.getLogger(__name__)


class LostRequestWatch:
    """Compares the log with the queue. `on_lost`: called for each request that is open here and
    neither waits nor runs anywhere. For one event loop.

    A suspended frontend, a full socket or a Redis that lost its data can cost a request its end.
    Without this it would be noticed only when no output has come for `frontend.progress_timeout`.
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
        self._missed: dict[str, float] = {}  # at the last look: request id -> its last progress

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look(time.monotonic())
            except QueueUnavailableError as error:
                log.debug("%s", error)

    async def look(self, now_s: float) -> None:
        """Raises QueueUnavailableError."""
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
