"""Requests wait for Redis for a limited time and leave nothing in it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from redis import Redis

from prism.queueing.server import BundledRedis
from tests.frontend.conftest import ids_of, make_config, stack_of
from tests.frontend.scripted_agent import ScriptedAgent, answering
from tests.frontend.test_faults import BODY, until


async def test_redis_down_and_up_again(namespace: str, short_dir: Path) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as redis:
        config = make_config(redis.url, namespace, short_dir, queue_timeout_s=0.5)
        async with stack_of(config) as stack:
            redis.kill()
            response = await stack.client.post("/v1/completions", json=BODY)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["code"] == "queue_unavailable"
            assert (await stack.client.get("/health")).status_code == 503
            assert (await stack.client.get("/metrics")).status_code == 200
            redis.start()
            assert (await stack.client.get("/health")).json()["reason"].startswith("starting")


async def test_a_redis_that_takes_no_writes_is_an_outage(namespace: str, short_dir: Path) -> None:
    """Returns 503 while Redis's memory is full, as on a managed server, and then recovers."""
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as server, Redis.from_url(server.url) as redis:
        config = make_config(server.url, namespace, short_dir, queue_timeout_s=0.5)
        async with stack_of(config) as stack:
            stack.agent.script = answering(ids_of("fine"))
            redis.config_set("maxmemory", 1)
            await asyncio.sleep(2.5)  # past a heartbeat
            response = await stack.client.post("/v1/completions", json=BODY)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "queue_unavailable"
            assert not stack.state.dispatcher.broken.is_set()
            redis.config_set("maxmemory", 0)
            response = await stack.client.post("/v1/completions", json=BODY)
            assert response.json()["choices"][0]["text"] == "fine"
            await until(lambda: bool(redis.keys(f"{namespace}:*f0*")))


async def test_requests_wait_for_redis(namespace: str, short_dir: Path) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as redis:
        async with stack_of(make_config(redis.url, namespace, short_dir)) as stack:
            stack.agent.script = answering(ids_of("fine"))
            redis.kill()
            posts = [stack.client.post("/v1/completions", json=BODY) for _ in range(3)]
            waiting = asyncio.gather(*posts)
            await until(lambda: len(stack.state.dispatcher.log) == 3)
            await asyncio.sleep(0.5)
            redis.start()
            async with ScriptedAgent(stack.agent.config) as restarted:
                restarted.script = stack.agent.script
                answers = await waiting
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["fine"] * 3


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_silent_redis_costs_no_more_than_the_bound(
    namespace: str, short_dir: Path, streaming: bool
) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as redis:
        config = make_config(redis.url, namespace, short_dir, queue_timeout_s=0.5)
        async with stack_of(config) as stack:
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
            body = {**BODY, "stream": streaming}
            response = await stack.client.post("/v1/completions", json=body, timeout=8)
            os.kill(redis.pid, signal.SIGCONT)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "queue_unavailable"
            assert len(stack.state.dispatcher.log) == 0


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_goes_while_redis_is_away_leaves_nothing(
    namespace: str, short_dir: Path, streaming: bool
) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as redis:
        async with stack_of(make_config(redis.url, namespace, short_dir)) as stack:
            redis.kill()
            body = {**BODY, "stream": streaming}
            with pytest.raises(httpx.ReadTimeout):
                await stack.client.post("/v1/completions", json=body, timeout=0.3)
            await until(lambda: len(stack.state.dispatcher.log) == 0)
            redis.start()
            assert await stack.state.queue.depth("host:0") == 0
