"""Cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_RETRY_S = 5.0


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until all of them have ended. Drops what they raise. Before Python
    3.12 `asyncio.wait_for` loses a cancellation that arrives as its awaitable ends, so tasks that
    are still running are cancelled again."""
    tasks = left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_RETRY_S)
    await asyncio.gather(*tasks, return_exceptions=True)
