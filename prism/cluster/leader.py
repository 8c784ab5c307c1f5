"""Leader election of schedulers: the holder of a lease in Redis plans, the others wait for it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.queueing.request_queue import RequestQueue
from prism.tasks import cancel_all

SCHEDULER = "scheduler"  # name of the lease; no device has this name
LEASE_S = 6.0
_RENEW_S = 1.5
_LOOK_S = 1.0

log = logging.getLogger("prism.cluster")


async def run_as_leader(
    config: ClusterConfig, stop: asyncio.Event, run: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    """Waits for the lease and calls `run` while holding it, repeatedly until `stop` is set.

    `run` gets an event. It is set on `stop`, when the lease is lost, or when the lease could not be
    renewed for its whole duration; `run` must then return.
    """
    queue = RequestQueue.connect(config.redis_url, config.namespace)
    owner = f"{config.node}-{os.getpid()}-{uuid4().hex}"
    try:
        while not stop.is_set():
            epoch = await _take(queue, owner)
            if epoch is None:
                await _wait(stop, _LOOK_S)
                continue
            log.info("this scheduler is the leader now")
            await _lead(queue, owner, epoch, stop, run)
    finally:
        await queue.close()


async def _take(queue: RequestQueue, owner: str) -> int | None:
    """Returns the lease's epoch, or None if another scheduler holds it or Redis is unavailable."""
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
        log.info("the lease was not released and will expire: %s", error)


async def _hold(
    queue: RequestQueue, owner: str, epoch: int, stop: asyncio.Event, over: asyncio.Event
) -> None:
    """Renews the lease until it is lost or `stop` is set, then sets `over`.

    Redis may be unavailable for less than the lease's duration; nothing is planned meanwhile.
    """
    renewed_s = time.monotonic()
    while not stop.is_set() and time.monotonic() - renewed_s < LEASE_S:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LEASE_S - (began_s - renewed_s)):
                await queue.renew(SCHEDULER, owner, epoch, LEASE_S)
            renewed_s = began_s
        except LeaseLostError as error:
            log.warning("another scheduler is the leader: %s", error)
            break
        except (QueueUnavailableError, TimeoutError) as error:
            log.warning("the lease could not be renewed: %s", error or "no answer")
        await _wait(stop, _RENEW_S)
    over.set()


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
