"""Lock that is shared fairly by the clients of a frontend."""

from __future__ import annotations

import asyncio

from prism.frontend.http import calls


def client_name() -> str:
    """Returns the key of the current request, or its client's address without keys."""
    call = calls.current.get()
    return (call.key or call.client) if call is not None else ""


class FairLock:
    """Lock for which the client that used it least is next (start-time fair queueing). For one
    event loop."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._floor_s = 0.0  # time used by the last holder; where new clients start
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._is_taken = False

    async def acquire(self, client: str) -> None:
        """Waits for the lock, which is held until `release`."""
        self._used_s[client] = max(self._used_s.get(client, 0.0), self._floor_s)
        acquired = asyncio.get_running_loop().create_future()
        self._waiting.append((client, acquired))
        self._next()
        try:
            await acquired
        except asyncio.CancelledError:
            if acquired.done() and not acquired.cancelled():
                self.release(client, 0.0)
            self._waiting = [(c, each) for c, each in self._waiting if each is not acquired]
            raise

    def release(self, client: str, used_s: float) -> None:
        """Releases the lock and charges the client with `used_s` seconds."""
        self._used_s[client] += used_s
        self._is_taken = False
        self._next()
        if not self._is_taken:
            self._used_s.clear()
            self._floor_s = 0.0

    def _next(self) -> None:
        if self._is_taken or not self._waiting:
            return
        client, acquired = found = min(self._waiting, key=lambda each: self._used_s[each[0]])
        self._waiting.remove(found)
        self._floor_s, self._is_taken = self._used_s[client], True
        acquired.set_result(None)
