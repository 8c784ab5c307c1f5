"""Retries queue operations while Redis is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import TypeVar

from prism.errors import QueueUnavailableError

T = TypeVar("T")

_PAUSES_S = (0.05, 0.1, 0.2, 0.5)
_PAUSE_MAX_S = 1.0


async def retry_until_available(attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Returns the result of the first successful `attempt`. Raises the last QueueUnavailableError
    after `timeout_s` seconds (`frontend.queue_timeout`)."""
    error = QueueUnavailableError("Redis does not answer")
    try:
        async with asyncio.timeout(timeout_s):
            for pause_s in chain(_PAUSES_S, repeat(_PAUSE_MAX_S)):
                try:
                    return await attempt()
                except QueueUnavailableError as failed:
                    error = failed
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise error from None
    raise AssertionError("the pauses are endless")
