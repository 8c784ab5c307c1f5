"""Waiting for a condition over shared state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Change notification: `notify` follows every change of the scheduler's state.

    Not thread-safe: use from one event loop.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.version = 0  # number of changes, so that a busy task misses none

    def notify(self) -> None:
        """Wakes all waiting tasks to check their conditions again."""
        self.version += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits until `holds()` is True. Returns False if it is not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._event.wait()
        except TimeoutError:
            return holds()
        return True

    async def wait_since(self, version: int, timeout_s: float) -> bool:
        """Waits for a change after `version`. Returns False if there is none in `timeout_s`."""
        return await self.wait_until(lambda: self.version != version, timeout_s)
