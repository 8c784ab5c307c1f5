"""Which scheduler of several plans: the one that holds a lease in Redis. The others wait for it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from prism.config.schema import ClusterConfig
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.queueing.requests import RequestQueue
from prism.tasks import cancel_all

SCHEDULER = "scheduler"  # no device has this name
LEASE_S = 6.0
_RENEW_S = 1.5
_LOOK_S = 1.0

log = logging.getLogger("prism.cluster")


async def leading(
    config: ClusterConfig, stop: asyncio.Event, run: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    """Until `stop`: wait for the lease, then `run` until the event that it gets is set, because the
    lease was lost or could not be renewed for as long as it lasts."""
    queue = RequestQueue.connect(config.redis_url, config.namespace)
    owner = f"{config.node}-{os.getpid()}-{uuid4().hex}"
    try:
        while not stop.is_set():
            epoch = await _take(queue, owner)
            if epoch is None:
                await _wait(stop, _LOOK_S)
                continue
            log.info("this scheduler leads from now on")
            await _lead(queue, owner, epoch, stop, run)
    finally:
        await queue.close()


async def _take(queue: RequestQueue, owner: str) -> int | None:
    """None: another one leads, or Redis is away."""
    try:
        return await queue.acquire(SCHEDULER, owner, LEASE_S)
    except (LeaseLostError, QueueUnavailableError) as error:
        log.debug("%s", error)
        return None


async def _lead(
    queue: RequestQueue,
    owner: str,
    epoch: int,
    stop: asyncio.Event,
    run: Callable[[asyncio.Event], Awaitable[None]],
) -> None:
    over = asyncio.Event()
    holding = asyncio.create_task(_hold(queue, owner, epoch, stop, over))
    try:
        await run(over)
    finally:
        await cancel_all([holding])
    try:
        await queue.release(SCHEDULER, owner, epoch)
    except (QueueUnavailableError, LeaseLostError) as error:
        log.info("the lease is left to run out: %s", error)


async def _hold(
    queue: RequestQueue, owner: str, epoch: int, stop: asyncio.Event, over: asyncio.Event
) -> None:
    """Renew until `stop`, or until the lease is gone; then `over` is set. Redis may be away for
    shorter than the lease. While it is, nothing is planned."""
    renewed_s = time.monotonic()
    while not stop.is_set() and time.monotonic() - renewed_s < LEASE_S:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LEASE_S - (began_s - renewed_s)):
                await queue.renew(SCHEDULER, owner, epoch, LEASE_S)
            renewed_s = began_s
        except LeaseLostError as error:
            log.warning("another scheduler leads: %s", error)
            break
        except (QueueUnavailableError, TimeoutError) as error:
            log.warning("the lease is not renewed: %s", error or "no answer")
        await _wait(stop, _RENEW_S)
    over.set()


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
