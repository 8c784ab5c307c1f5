"""The end of tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 5.0


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Until all have ended; what they raise is dropped. Before Python 3.12 `asyncio.wait_for` loses
    a cancellation that comes as what it waits for ends, so whoever goes on is cancelled again."""
    tasks = left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
