"""Waiting for a condition over shared state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Every change of the scheduler's state is followed by `notify`. For one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.version = 0  # counts the changes, so that a busy task misses none

    def notify(self) -> None:
        """Something changed: check all conditions that are waited for."""
        self.version += 1
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `holds()`; False when it does not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._event.wait()
        except TimeoutError:
            return holds()
        return True

    async def since(self, version: int, timeout_s: float) -> bool:
        """Wait until something changed after `version`; False when nothing did."""
        return await self.until(lambda: self.version != version, timeout_s)
