"""Puts requests into the shared queue: those that come at once go there together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from prism.errors import QueueUnavailableError
from prism.frontend.request_log import OpenRequest, RequestLog
from prism.queueing.requests import RequestQueue

# A batch that Redis has not answered after this time holds up the next one no longer.
_SLOW_S = 0.05
# Redis does nothing else while it takes a batch.
_BATCH_MAX = 256
# A batch waits for what follows at once, so that an idle engine's first step has all of it.
_TOGETHER_S = 0.005
# Turns of the loop that a request takes from its socket to here, and one more.
_TURNS = 3

_Put = tuple[Sequence[OpenRequest], "asyncio.Future[None]"]


class Enqueuer:
    """What is put while a batch is on its way makes the next batch: for both sides a call costs
    several times what one more request in it does. For one event loop."""

    def __init__(self, queue: RequestQueue, log: RequestLog) -> None:
        self._queue, self._log = queue, log
        self._next: list[_Put] = []
        self._awaited: asyncio.Task[None] | None = None  # the batch that the next one waits for
        self._batches: set[asyncio.Task[None]] = set()

    async def put(self, entries: Sequence[OpenRequest]) -> None:
        """Those of them that are open when their batch goes. Raises QueueUnavailableError: Redis
        may have taken them all the same, and they may be put again."""
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

    def _pass(self, batch: asyncio.Task[None] | None) -> None:
        """The next one waits for it no longer."""
        if self._awaited is batch:
            self._awaited = None
            self._begin()

    def _taken(self) -> list[_Put]:
        """The first of them, together at most _BATCH_MAX requests, where the first has no more."""
        taken, left = [self._next[0]], _BATCH_MAX - len(self._next[0][0])
        for put in self._next[1:]:
            if (left := left - len(put[0])) < 0:
                break
            taken.append(put)
        del self._next[: len(taken)]
        return taken

    async def _none_follow(self) -> None:
        """Until some turns of the loop have brought nothing more: alone a request waits for none of
        its kind. At most _TOGETHER_S."""
        until_s, known, still = time.monotonic() + _TOGETHER_S, len(self._next), 0
        while still < _TURNS and time.monotonic() < until_s:
            await asyncio.sleep(0)
            still = still + 1 if len(self._next) == known else 0
            known = len(self._next)

    async def _send(self) -> None:
        await self._none_follow()
        puts, batch = self._taken(), asyncio.current_task()
        # Not before: a loop that stood still would begin another batch, with nothing left for it.
        asyncio.get_running_loop().call_later(_SLOW_S, self._pass, batch)
        try:
            wanted = [each for entries, done in puts if not done.done() for each in entries]
            still_open = [each for each in wanted if self._log.get(each.request.id) is each]
            await self._queue.enqueue_all([each.request for each in still_open])
        except BaseException as error:
            _settle(puts, error)
            if not isinstance(error, QueueUnavailableError):
                raise
        else:
            for each in still_open:
                each.enqueued = True
            _settle(puts)
        finally:
            self._pass(batch)


def _settle(puts: Sequence[_Put], error: BaseException | None = None) -> None:
    for done in (done for _, done in puts if not done.done()):
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
