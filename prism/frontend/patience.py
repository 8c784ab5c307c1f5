"""Redis may be away for a while: what a request asks of it is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import TypeVar

from prism.errors import QueueUnavailableError

T = TypeVar("T")

_PAUSES_S = (0.05, 0.1, 0.2, 0.5)
_PAUSE_MAX_S = 1.0


async def patiently(attempt: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """What `attempt` returns, once Redis answers. Raises QueueUnavailableError after `timeout_s`
    seconds (`frontend.queue_timeout`)."""
    error = QueueUnavailableError("Redis is silent")
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
    raise AssertionError("pauses have no end")
