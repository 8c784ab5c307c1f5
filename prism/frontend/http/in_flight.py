"""Number of HTTP requests that are being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prism.frontend.http.error_bodies import UnavailableError


class InFlight:
    """Number of HTTP requests that are being answered, and of shared answers that are being
    computed. A shutdown waits for them. For one event loop."""

    def __init__(self) -> None:
        self.draining = False  # set at shutdown; new requests are rejected
        self._count = 0
        self._left = asyncio.Event()

    @property
    def busy(self) -> bool:
        return self._count > 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request within the block. Raises UnavailableError while draining."""
        if self.draining:
            message = "this server is shutting down; try again shortly"
            raise UnavailableError(message, "shutting_down")
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Counts what outlasts the block of its request; `leave` must follow."""
        self._count += 1

    def leave(self) -> None:
        self._count -= 1
        self._left.set()

    async def wait_idle(self) -> None:
        """Waits until no request is in flight."""
        while self._count:
            self._left.clear()
            await self._left.wait()
