"""Entries of requests to external servers that may be put to sleep."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count

import msgspec

from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.queue_retry import retry_until_available
from prism.frontend.http.error_bodies import UnavailableError, queue_unavailable
from prism.frontend.live_config import LiveConfig
from prism.messages import MALFORMED_ERRORS
from prism.messages.external import ExternalModel, Sleep
from prism.queueing.request_queue import RequestQueue

_POLL_S = 0.05
_LEAVE_RETRY_S = 1.0


class AsleepError(UnavailableError):
    """The server sleeps and was not woken in time."""

    def __init__(self, url: str, problem: str) -> None:
        why = f" ({problem})" if problem else ""
        super().__init__(f"the server {url} was not woken in time{why}", "model_unavailable")


class QueueTimeoutError(UnavailableError):
    """Redis does not tell whether servers are awake."""

    def __init__(self, error: QueueUnavailableError) -> None:
        told = queue_unavailable(error)
        super().__init__(str(told), told.code)


class Entrances:
    """Entries of this frontend's requests to servers. For one event loop."""

    def __init__(self, live: LiveConfig, queue: RequestQueue, frontend_id: str) -> None:
        self._live = live
        self._queue = queue
        self._id = frontend_id
        self._numbers = count()
        # Servers that may still sleep after a reload without `sleep_after`.
        self._slept: set[str] = set()
        self._polls: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def entered(
        self, url: str, model: ExternalModel, *, is_last: bool
    ) -> AsyncIterator[None]:
        """Keeps a server awake within the block, which begins when the server is awake.

        Args:
            is_last: wait also for a server that could not be woken so far.

        Raises:
            UnavailableError: the server was not woken within `engine.activation_timeout`, or Redis
                was unavailable for `frontend.queue_timeout`.
        """
        if model.sleep_after_s is None and url not in self._slept:
            yield
            return
        self._slept.add(url)
        number, is_known = next(self._numbers), False
        try:
            await self._awake(url, number, is_last=is_last)
            is_known = True
            yield
        finally:
            task = asyncio.create_task(self._leave(url, number, twice=not is_known))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _awake(self, url: str, number: int, *, is_last: bool) -> None:
        """Waits until the server is awake. One request for each server polls."""
        problem, timeout_s = "", float(self._live.config.engine.activation_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                if not await self._sleep(url, number):
                    return
                async with self._polls[url]:
                    while sleep := await self._sleep(url, number):
                        problem = sleep.problem
                        if problem and not is_last:
                            raise AsleepError(url, problem)
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AsleepError(url, problem) from None

    async def _sleep(self, url: str, number: int) -> Sleep | None:
        enter = partial(self._queue.sleep.enter, url, self._id, number)
        try:
            text = await retry_until_available(enter, self._live.config.frontend.queue_timeout_s)
        except QueueUnavailableError as error:
            raise QueueTimeoutError(error) from error
        try:
            return msgspec.json.decode(text, type=Sleep) if text else None
        except MALFORMED_ERRORS:  # the scheduler removes it
            return Sleep("asleep", "")

    async def _leave(self, url: str, number: int, *, twice: bool) -> None:
        """Leaves a server. `twice`: a call that was cancelled may still enter it."""
        while True:
            with suppress(QueueUnavailableError):
                await self._queue.sleep.leave(url, self._id, number)
                if not twice:
                    return
                twice = False
            await asyncio.sleep(_LEAVE_RETRY_S)

    async def close(self) -> None:
        """Entries that are left end with the frontend's heartbeat."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
