"""Frontends without heartbeats: suspended, cut off, or unable to write to Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis import Redis

from prism.errors import QueueUnavailableError
from prism.messages.requests import FRONTEND_SILENT, FrontendGone
from prism.queueing import BundledRedis, RequestQueue
from tests.agent.harness import FakeFrontend, World, until


async def test_a_silent_frontend_gets_what_was_stopped(agent_world: World) -> None:
    """Covers waiting and running requests (four at a time); the frontend may resume."""
    await agent_world.serve("a")
    this = FakeFrontend(agent_world.context, agent_world.config, agent_world.queue, "f1")
    hearing = asyncio.create_task(this.run())
    sent = await this.send(6, "a", max_tokens=400)  # its heart never beats
    await until(lambda: all(this.stream(each.id).ended for each in sent))
    failures = [failure for each in sent for failure in this.stream(each.id).failures]
    assert [(f.code, f.retryable) for f in failures] == [(FRONTEND_SILENT, True)] * 6
    hearing.cancel()
    this.close()


async def test_what_a_dead_frontend_left_goes_at_once(agent_world: World) -> None:
    """Uses the launcher's message, since the heartbeat continues.

    Covers requests that run, wait here, wait for a place, and leave the queue afterwards.
    """
    await agent_world.serve("a")
    this = FakeFrontend(agent_world.context, agent_world.config, agent_world.queue, "f1.1")
    beating = asyncio.create_task(this.beat())
    await this.send(6, "a", max_tokens=400)
    await this.send(2, "b")
    stays = agent_world.frontend
    others = [*await stays.send(1, "a"), *await stays.send(1, "b")]
    await until(lambda: (model := agent_world.scheduler.model("a")) and model.waiting)
    await this.send_message(FrontendGone("f1.1"))
    await stays.finish(others[:1])
    await until(lambda: not agent_world.agent_requests())
    while await agent_world.queue.unplaced_counts() != {"b": 1}:
        await asyncio.sleep(0.01)
    late = await this.send(1, "a")
    while await agent_world.queue.open_attempts([late[0].id]):
        await asyncio.sleep(0.01)
    assert not this.stream(late[0].id).chunks
    beating.cancel()
    this.close()


async def test_no_frontend_counts_as_dead_while_redis_takes_no_writes(
    short_dir: Path, namespace: str
) -> None:
    """Heartbeats cannot be written either."""
    with BundledRedis(short_dir) as server, Redis.from_url(server.url) as redis:
        queue = RequestQueue.connect(server.url, namespace)
        assert await queue.live_frontends(["f0"]) == set()
        redis.config_set("maxmemory", 1)
        with pytest.raises(QueueUnavailableError, match="takes no writes"):
            await queue.live_frontends(["f0"])
        await queue.close()
