"""Puts requests into the shared queue: those that come at once go there together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from prism.frontend.request_log import OpenRequest, RequestLog
from prism.queueing.requests import RequestQueue

# A batch that Redis has not answered after this time holds up the next one no longer.
_SLOW_S = 0.05
# Redis does nothing else while it takes a batch.
_BATCH_MAX = 256

_Put = tuple[Sequence[OpenRequest], "asyncio.Future[None]"]


class Enqueuer:
    """What is put while a batch is on its way makes the next batch: for both sides a call costs
    several times what one more request in it does. For one event loop."""

    def __init__(self, queue: RequestQueue, log: RequestLog) -> None:
        self._queue, self._log = queue, log
        self._next: list[_Put] = []
        self._sending: asyncio.Task[None] | None = None
        self._batches: set[asyncio.Task[None]] = set()

    async def put(self, entries: Sequence[OpenRequest]) -> None:
        """Those of them that are open when their batch goes. Raises QueueUnavailableError: Redis
        may have taken them all the same, and they may be put again."""
        done = asyncio.get_running_loop().create_future()
        self._next.append((entries, done))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        await done

    async def _send_all(self) -> None:
        while self._next:
            puts = self._taken()
            batch = asyncio.create_task(self._send(puts))
            self._batches.add(batch)
            batch.add_done_callback(partial(self._settle, puts))
            await asyncio.wait([batch], timeout=_SLOW_S)

    def _taken(self) -> list[_Put]:
        """The first of them, together at most _BATCH_MAX requests, where the first has no more."""
        taken, left = [self._next[0]], _BATCH_MAX - len(self._next[0][0])
        for put in self._next[1:]:
            if (left := left - len(put[0])) < 0:
                break
            taken.append(put)
        del self._next[: len(taken)]
        return taken

    async def _send(self, puts: list[_Put]) -> None:
        wanted = [each for entries, done in puts if not done.done() for each in entries]
        still_open = [each for each in wanted if self._log.get(each.request.id) is each]
        await self._queue.enqueue_all([each.request for each in still_open])
        for each in still_open:
            each.enqueued = True

    def _settle(self, puts: list[_Put], batch: asyncio.Task[None]) -> None:
        self._batches.discard(batch)
        error = asyncio.CancelledError() if batch.cancelled() else batch.exception()
        for done in (done for _, done in puts if not done.done()):
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
