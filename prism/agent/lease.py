"""The agent's hold on its device's queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from prism.agent.timing import Timing
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.queueing import RequestQueue

log = logging.getLogger(__name__)


class Lease:
    """`epoch` is the token for the queue's calls; it changes when the lease had to be retaken.

    held: ids of the requests that this agent runs. on_retaken: the queue may have changed
    meanwhile, read it anew.
    """

    def __init__(
        self,
        *,
        queue: RequestQueue,
        device: str,
        owner: str,
        timing: Timing,
        held: Callable[[], Collection[str]],
        on_retaken: Callable[[], None],
    ) -> None:
        self.epoch = 0
        self._queue = queue
        self._device = device
        self._owner = owner
        self._timing = timing
        self._held = held
        self._on_retaken = on_retaken

    async def acquire(self) -> None:
        """Wait for an earlier holder's lease to run out, and for Redis, up to `lease_wait_s`.

        Raises LeaseLostError or QueueUnavailableError after that.
        """
        deadline_s = time.monotonic() + self._timing.lease_wait_s
        while True:
            try:
                await self._take()
            except (LeaseLostError, QueueUnavailableError) as error:
                if time.monotonic() >= deadline_s:
                    raise
                log.warning("%s", error)
                await asyncio.sleep(self._timing.retry_s)
            else:
                return

    async def run(self) -> None:
        """Renew for ever. Raises LeaseLostError when another agent has the queue."""
        while True:
            await asyncio.sleep(self._timing.lease_ttl_s / 3)
            epoch = self.epoch
            try:
                await self._queue.renew(self._device, self._owner, epoch, self._timing.lease_ttl_s)
            except LeaseLostError:
                await self.retake(epoch)
            except QueueUnavailableError as error:
                log.warning("the lease is not renewed: %s", error)

    async def retake(self, lost_epoch: int) -> None:
        """After `lost_epoch` was refused: Redis lost its data, or somebody else has the queue.

        Raises LeaseLostError in the second case. Does nothing if it was retaken meanwhile.
        """
        if self.epoch != lost_epoch:
            return
        log.warning("the queue of %s has to be taken again", self._device)
        try:
            await self._take()
        except QueueUnavailableError as error:
            log.warning("%s", error)
            return
        self._on_retaken()

    async def release(self) -> None:
        try:
            await self._queue.release(self._device, self._owner, self.epoch)
        except QueueUnavailableError as error:
            log.warning("the lease is left to run out: %s", error)

    async def _take(self) -> None:
        self.epoch = await self._queue.acquire(
            self._device, self._owner, self._timing.lease_ttl_s, keep=self._held()
        )
