"""Enqueues requests in batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.request_log import OpenRequest, RequestLog
from prism.frontend.http.error_bodies import OverloadedError
from prism.queueing.request_queue import RequestQueue

# The next batch is sent after this time although Redis has not answered the last one.
_SLOW_S = 0.05
# Redis does nothing else while it processes a batch.
_BATCH_MAX = 256
# A batch waits for requests that follow at once, so that an idle engine's first step has them all.
_WAIT_MAX_S = 0.005
# Turns of the event loop from a request's socket to `put`, plus one.
_IDLE_TURNS = 3

_Put = tuple[Sequence[OpenRequest], "asyncio.Future[None]"]


class Enqueuer:
    """Sends requests that arrive during a call to Redis as the next batch: for both sides a call
    costs several times as much as one more request in it. For one event loop."""

    def __init__(self, queue: RequestQueue, log: RequestLog) -> None:
        self._queue, self._log = queue, log
        self._next: list[_Put] = []
        self._awaited: asyncio.Task[None] | None = None  # the batch that the next one waits for
        self._batches: set[asyncio.Task[None]] = set()

    async def put(self, entries: Sequence[OpenRequest]) -> None:
        """Enqueues the entries that are still open when the batch is sent. Raises
        QueueUnavailableError: Redis may have taken them anyway, and they may be put again. Raises
        OverloadedError if Redis has too many images."""
        # Not with the batch, which other requests would wait for.
        shown = (image for entry in entries for image in entry.request.images)
        if not await self._queue.store_images({image.digest: image.tensors for image in shown}):
            raise OverloadedError("the cluster's requests have too many images; try again later")
        done = asyncio.get_running_loop().create_future()
        self._next.append((entries, done))
        self._begin()
        await done

    def _begin(self) -> None:
        if not self._next or self._awaited is not None:
            return
        self._awaited = batch = asyncio.create_task(self._send())
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)

    def _stop_waiting_for(self, batch: asyncio.Task[None] | None) -> None:
        """Lets the next batch start without waiting for `batch`."""
        if self._awaited is batch:
            self._awaited = None
            self._begin()

    def _take_batch(self) -> list[_Put]:
        """Removes and returns the first entries of `_next`: at most _BATCH_MAX requests, or the
        first entry alone if it has more."""
        taken, left = [self._next[0]], _BATCH_MAX - len(self._next[0][0])
        for put in self._next[1:]:
            if (left := left - len(put[0])) < 0:
                break
            taken.append(put)
        del self._next[: len(taken)]
        return taken

    async def _wait_for_more(self) -> None:
        """Waits until _IDLE_TURNS turns of the loop have brought no further request, at most
        _WAIT_MAX_S."""
        until_s, known, still = time.monotonic() + _WAIT_MAX_S, len(self._next), 0
        while still < _IDLE_TURNS and time.monotonic() < until_s:
            await asyncio.sleep(0)
            still = still + 1 if len(self._next) == known else 0
            known = len(self._next)

    async def _send(self) -> None:
        await self._wait_for_more()
        puts, batch = self._take_batch(), asyncio.current_task()
        # Not earlier: after a stall of the loop, the timer would start a batch with no requests.
        asyncio.get_running_loop().call_later(_SLOW_S, self._stop_waiting_for, batch)
        try:
            wanted = [each for entries, done in puts if not done.done() for each in entries]
            still_open = [each for each in wanted if self._log.get(each.request.id) is each]
            requests = [each.request for each in still_open]
            await self._queue.enqueue_all([each.without_tensors() for each in requests])
        except BaseException as error:
            _settle(puts, error)
            if not isinstance(error, QueueUnavailableError):
                raise
        else:
            for each in still_open:
                each.enqueued = True
            _settle(puts)
        finally:
            self._stop_waiting_for(batch)


def _settle(puts: Sequence[_Put], error: BaseException | None = None) -> None:
    for done in (done for _, done in puts if not done.done()):
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
