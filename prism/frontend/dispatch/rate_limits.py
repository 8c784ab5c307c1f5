"""Rate limits of API keys, counted in Redis for all frontends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from math import ceil
from typing import Any

from prism.config.schema.access import ApiKey
from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.queue_retry import retry_until_available
from prism.frontend.http.error_bodies import RateLimitError
from prism.frontend.live_config import LiveConfig
from prism.queueing.request_queue import RequestQueue

log = logging.getLogger(__name__)


class RateLimits:
    """Rate limits of API keys, counted in Redis for all frontends. For one event loop.

    A charge may be counted twice if the connection to Redis breaks meanwhile."""

    def __init__(self, live: LiveConfig, queue: RequestQueue) -> None:
        self._live = live
        self._queue = queue
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, key: ApiKey | None, prompt_tokens: int) -> None:
        """Charges a request. Raises RateLimitError with the time to retry, or QueueUnavailableError
        if Redis was unavailable for `frontend.queue_timeout`."""
        if key is None or not _is_limited(key):
            return
        take = partial(self._queue.take_rate, key.name, *_rates(key), prompt_tokens)
        timeout_s = self._live.config.frontend.queue_timeout_s
        wait_s = await retry_until_available(take, timeout_s)
        if wait_s > 0:
            error = RateLimitError(
                f"the key {key.name} is limited to {_limits(key)}; try again in {wait_s:.1f} s"
            )
            error.retry_after_s = ceil(wait_s)
            raise error

    def give_back(self, key: ApiKey | None, prompt_tokens: int) -> None:
        """Refunds the charge of a request that was rejected after `begin`."""
        if key is not None and _is_limited(key):
            back = partial(self._queue.refund_rate, key.name, *_rates(key), prompt_tokens)
            self._spawn(self._count(key, back))

    def end(self, key: ApiKey | None, output_tokens: int) -> None:
        """Charges the generated tokens."""
        if key is not None and key.tokens_per_minute and output_tokens:
            owed = partial(self._queue.take_rate, key.name, *_rates(key), output_tokens)
            self._spawn(self._count(key, partial(owed, spent=True)))

    async def _count(self, key: ApiKey, change: Callable[[], Awaitable[object]]) -> None:
        try:
            await change()
        except QueueUnavailableError as error:
            log.warning("the rate of the key %s is not up to date: %s", key.name, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_limited(key: ApiKey) -> bool:
    return any(_rates(key))


def _rates(key: ApiKey) -> tuple[int, int]:
    return key.requests_per_minute, key.tokens_per_minute


def _limits(key: ApiKey) -> str:
    found = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
    return " and ".join(f"{n} {what}" for what, n in found.items() if n) + " per minute"
