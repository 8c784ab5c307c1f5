"""Reads the device's queue into the mirror."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from prism.agent.mirror import Entry
from prism.agent.timing import Timing
from prism.errors import QueueUnavailableError
from prism.queueing import RequestQueue

log = logging.getLogger(__name__)

BLOCK_S = 1.0


class Intake:
    """on_entry: a waiting request, perhaps seen before. on_replayed: all entry ids that wait."""

    def __init__(
        self,
        queue: RequestQueue,
        device: str,
        timing: Timing,
        on_entry: Callable[[Entry], None],
        on_replayed: Callable[[Collection[str]], None],
    ) -> None:
        self._queue = queue
        self._device = device
        self._timing = timing
        self._on_entry = on_entry
        self._on_replayed = on_replayed
        self._replay = True
        self._cursor = "0"

    def replay(self) -> None:
        """Read everything that waits again: the queue may have changed unseen."""
        self._replay = True

    async def run(self) -> None:
        down = False
        while True:
            try:
                if self._replay:
                    await self._read_all()
                await self._read(BLOCK_S)
                down = False
            except QueueUnavailableError as error:
                log.log(logging.DEBUG if down else logging.WARNING, "%s", error)
                down = self._replay = True
                await asyncio.sleep(self._timing.retry_s)

    async def _read_all(self) -> None:
        self._replay, self._cursor = False, "0"
        seen: set[str] = set()
        while entries := await self._read(0.0):
            seen.update(entries)
        self._on_replayed(seen)

    async def _read(self, block_s: float) -> list[str]:
        entries = await self._queue.read(self._device, self._cursor, block_s)
        for entry_id, request in entries:
            self._cursor = entry_id
            self._on_entry(Entry(entry_id, request))
        return [entry_id for entry_id, _ in entries]
