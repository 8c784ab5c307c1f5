"""Changes that Redis still has to hear of; kept until it has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prism.messages import Request
from prism.queueing import RequestQueue


class Errands:
    """Collected while messages are handled, carried out in one go before the next admission.

    That order matters: a request that ended is acknowledged before its next attempt can be
    admitted here. After an error everything is still there, and repeating is harmless.
    """

    def __init__(self) -> None:
        self._finished: dict[str, None] = {}
        self._forgotten: dict[str, None] = {}
        self._returned: dict[str, None] = {}
        self._moved: dict[str, Request] = {}
        self._unplaced: dict[str, None] = {}
        self._adopted: dict[str, None] = {}

    def finish(self, request_id: str) -> None:
        """It ended."""
        self._finished[request_id] = None

    def forget(self, request_id: str) -> None:
        """It waits in some queue, and nobody wants it any more."""
        self._forgotten[request_id] = None

    def requeue(self, request_id: str) -> None:
        """It was admitted, or may have been, and is on no engine."""
        self._returned[request_id] = None

    def move(self, request: Request) -> None:
        """It ran here, and goes on as this elsewhere."""
        self._moved[request.id] = request

    def unplace(self, entry_id: str) -> None:
        """It waits here, but its model does not come."""
        self._unplaced[entry_id] = None

    def adopt(self, entry_id: str) -> None:
        """It waits here, and runs already: Redis lost its data and was told anew."""
        self._adopted[entry_id] = None

    async def run(self, queue: RequestQueue, device: str, epoch: int) -> None:
        """Raises QueueUnavailableError, LeaseLostError."""
        await self._do(self._adopted, lambda ids: queue.admit(device, epoch, ids))
        await self._do(self._finished, lambda ids: queue.finish(device, epoch, ids))
        await self._move_all(queue, device, epoch)
        await self._do(self._returned, lambda ids: queue.requeue(device, epoch, ids))
        await self._do(self._forgotten, queue.forget)
        await self._do(self._unplaced, lambda ids: queue.unplace(device, epoch, ids))

    async def _move_all(self, queue: RequestQueue, device: str, epoch: int) -> None:
        if batch := list(self._moved.values()):
            await queue.move(device, epoch, batch)
            for request in batch:
                self._moved.pop(request.id)

    @staticmethod
    async def _do(ids: dict[str, None], call: Callable[[list[str]], Awaitable[object]]) -> None:
        """Those added while the call is under way are for the next time."""
        if batch := list(ids):
            await call(batch)
            for each in batch:
                ids.pop(each, None)
