"""Redis restarts without its data, or is another server: all requests are answered once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from prism.agent.state.device_state import AgentTiming
from prism.engines.fake import expected_tokens
from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.dispatch.request_log import Mailbox, OpenRequest
from prism.frontend.live_config import LiveConfig
from prism.frontend.metrics.request_metrics import Metrics
from prism.messages.requests import Chunk, Failure
from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import DEVICE, World, make_config, until, world

# A heartbeat that went with the data is there again before its frontend counts as dead.
TIMING = replace(FAST, frontend_missing_s=AgentTiming().frontend_missing_s)
COUNT = 50
AWAY_S = 1.5
MAX_TOKENS = 30


class Client:
    """Frontend's dispatcher, and the output of each of its requests."""

    def __init__(self, dispatcher: Dispatcher, this: World) -> None:
        self._dispatcher = dispatcher
        self._mailbox = Mailbox()
        made = [this.frontend.request("a", max_tokens=MAX_TOKENS) for _ in range(COUNT)]
        sender = dispatcher.frontend_id
        requests = [msgspec.structs.replace(each, frontend_id=sender) for each in made]
        self.opened = [OpenRequest(r, i, self._mailbox) for i, r in enumerate(requests)]
        self.got: list[list[int]] = [[] for _ in requests]
        self.failures: list[Failure] = []

    async def run(self) -> None:
        await self._dispatcher.submit(self.opened)
        while True:
            [(number, event)] = await self._mailbox.take(1)
            if isinstance(event, Chunk):
                self.got[number] += event.token_ids
                if event.finish_reason is not None:
                    self._dispatcher.close_requests([self.opened[number].request.id])
            elif event is None:
                self.got[number].clear()
            else:
                self.failures.append(event)

    @property
    def ended(self) -> int:
        return sum(len(tokens) == MAX_TOKENS for tokens in self.got)


@asynccontextmanager
async def background(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_placed(this: World) -> None:
    """Routes the model whenever it has no placement, as the cluster scheduler does."""
    while True:
        with suppress(QueueUnavailableError):
            if await this.queue.placement() != {"a": (DEVICE,)}:
                await this.queue.route("a", DEVICE)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def flushed(server: BundledRedis) -> AsyncIterator[None]:
    with Redis.from_url(server.url) as redis:
        redis.flushall()
    yield


@asynccontextmanager
async def killed(server: BundledRedis) -> AsyncIterator[None]:
    server.kill()
    yield
    server.start()


@asynccontextmanager
async def emptied(server: BundledRedis) -> AsyncIterator[None]:
    async with killed(server):
        shutil.rmtree(server.directory / "appendonlydir")
        yield


@asynccontextmanager
async def replaced_by_foreign(server: BundledRedis) -> AsyncIterator[None]:
    """Puts another server at the address, with the incarnation of another cluster."""
    async with emptied(server):
        yield
    with Redis.from_url(server.url) as redis:
        redis.set(f"{server.directory.parent.name}:incarnation", "foreign")


@asynccontextmanager
async def older(server: BundledRedis) -> AsyncIterator[None]:
    """Restores older data of the server, under the same incarnation."""
    files, copy = server.directory / "appendonlydir", server.directory / "older"
    shutil.copytree(files, copy)
    await asyncio.sleep(0.5)
    async with emptied(server):
        copy.rename(files)
        yield


@asynccontextmanager
async def stopped(server: BundledRedis) -> AsyncIterator[None]:
    """Suspends the server: connections stay open and get no answers."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    yield
    os.kill(server.pid, signal.SIGCONT)


@asynccontextmanager
async def out_of_memory(server: BundledRedis) -> AsyncIterator[None]:
    with Redis.from_url(server.url) as redis:
        redis.config_set("maxmemory", 1)
        yield
        redis.config_set("maxmemory", 0)


@asynccontextmanager
async def read_only(server: BundledRedis) -> AsyncIterator[None]:
    """Makes the server a replica, as a failover may."""
    with Redis.from_url(server.url) as redis:
        redis.replicaof("127.0.0.1", 1)
        yield
        redis.replicaof("NO", "ONE")


def left_over(server: BundledRedis) -> list[bytes]:
    """Returns the keys of requests in Redis."""
    with Redis.from_url(server.url) as redis:
        kinds = ("open", "running:*", "admitted:*")
        found = [key for kind in kinds for key in redis.keys(f"*:{kind}")]
        return found + [key for key in redis.keys("*:queue:*") if redis.xlen(key)]


OUTAGES = (
    flushed,
    killed,
    emptied,
    replaced_by_foreign,
    older,
    stopped,
    out_of_memory,
    read_only,
)


@pytest.mark.parametrize("outage", OUTAGES)
async def test_all_are_answered_once(
    short_dir: Path, outage: Callable[[BundledRedis], AbstractAsyncContextManager[None]]
) -> None:
    """Covers requests that wait when Redis fails, and those that arrive during the outage."""
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as server:
        config = make_config(short_dir, short_dir.name, server.url)
        async with world(config, TIMING) as this:
            await this.serve("a")
            dispatcher = Dispatcher(LiveConfig(config), "f1", this.queue, Metrics())
            await dispatcher.start()
            client, later = Client(dispatcher, this), Client(dispatcher, this)
            async with background(client.run(), keep_placed(this)):
                await until(lambda: client.ended >= 4)
                async with background(later.run()):
                    async with outage(server):
                        await asyncio.sleep(AWAY_S)
                    opened = client.opened + later.opened
                    await until(lambda: client.ended + later.ended == len(opened))
                    report = this.scheduler.model
                    await until(lambda: (m := report("a")) and m.finished_total == len(opened))
                    await until(lambda: (m := report("a")) and m.running + m.waiting == 0)
                    await until(lambda: not left_over(server))
            await dispatcher.close()
            assert not client.failures + later.failures
            assert client.got + later.got == [
                expected_tokens(each.request.prompt_ids, MAX_TOKENS) for each in opened
            ]
            found = report("a")
            assert found is not None
            assert found.prompt_tokens_total == sum(len(e.request.prompt_ids) for e in opened)
