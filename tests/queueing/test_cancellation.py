"""Cancelled callers end, at whatever moment of a call they are cancelled."""

from __future__ import annotations

import asyncio

from prism.queueing.request_queue import RequestQueue
from prism.queueing.server import BundledRedis


async def test_a_cancelled_loop_ends(redis_server: BundledRedis, namespace: str) -> None:
    queue = RequestQueue.connect(redis_server.url, namespace)

    async def forever() -> None:
        while True:
            await queue.placement()

    try:
        for yields in range(400):
            task = asyncio.create_task(forever())
            for _ in range(yields % 40):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=30)
            assert done, f"cancelled after {yields % 40} yields, it goes on"
    finally:
        await queue.close()
