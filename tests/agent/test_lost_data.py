"""Redis comes back without its data, or is another server: all is answered, and once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from prism.agent.state import AgentTiming
from prism.engines.fake import expected_tokens
from prism.errors import QueueUnavailableError
from prism.frontend.dispatcher import Dispatcher
from prism.frontend.metrics import Metrics
from prism.frontend.request_log import Mailbox, OpenRequest
from prism.messages.requests import Chunk, Failure
from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import DEVICE, World, make_config, until, world

# A heartbeat that went with the data is there again before its frontend counts as dead.
TIMING = replace(FAST, frontend_missing_s=AgentTiming().frontend_missing_s)
COUNT = 50
MAX_TOKENS = 30


class Client:
    """A frontend's dispatcher, and what each of its requests has got."""

    def __init__(self, dispatcher: Dispatcher, this: World) -> None:
        self._dispatcher = dispatcher
        self._mailbox: Mailbox = asyncio.Queue()
        made = [this.frontend.request("a", max_tokens=MAX_TOKENS) for _ in range(COUNT)]
        sender = {"frontend_id": dispatcher.frontend_id, "reply_to": dispatcher.reply_to}
        requests = [msgspec.structs.replace(each, **sender) for each in made]
        self.opened = [OpenRequest(r, i, self._mailbox) for i, r in enumerate(requests)]
        self.got: list[list[int]] = [[] for _ in requests]
        self.failures: list[Failure] = []

    async def run(self) -> None:
        await self._dispatcher.submit(self.opened)
        while True:
            number, *_, event = await self._mailbox.get()
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


@contextlib.asynccontextmanager
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
    """As the cluster scheduler does."""
    while True:
        with contextlib.suppress(QueueUnavailableError):
            if await this.queue.placement() != {"a": DEVICE}:
                await this.queue.route("a", DEVICE)
        await asyncio.sleep(0.1)


def flush(server: BundledRedis, directory: Path) -> None:
    with Redis.from_url(server.url) as redis:
        redis.flushall()


def restart_empty(server: BundledRedis, directory: Path) -> None:
    server.kill()
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()


def replace_by_foreign(server: BundledRedis, directory: Path) -> None:
    """Another server at the address, with the marks of another cluster's start."""
    restart_empty(server, directory)
    with Redis.from_url(server.url) as redis:
        redis.set(f"{directory.name}:incarnation", "foreign")


@pytest.mark.parametrize("lose", [flush, restart_empty, replace_by_foreign])
async def test_all_that_wait_are_answered_once(
    short_dir: Path, lose: Callable[[BundledRedis, Path], None]
) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as server:
        config = make_config(short_dir, short_dir.name, server.url)
        async with world(config, TIMING) as this:
            await this.serve("a")
            dispatcher = Dispatcher(config, "f1", this.queue, Metrics())
            await dispatcher.start()
            client = Client(dispatcher, this)
            async with background(client.run(), keep_placed(this)):
                await until(lambda: client.ended >= 4)
                lose(server, short_dir)
                await until(lambda: client.ended == COUNT)
                report = this.scheduler.model
                await until(lambda: (m := report("a")) and m.finished_total == COUNT)
                await until(lambda: (m := report("a")) and m.running + m.waiting == 0)
            await dispatcher.close()
            assert not client.failures
            assert client.got == [
                expected_tokens(each.request.prompt_ids, MAX_TOKENS) for each in client.opened
            ]
            found = report("a")
            assert found is not None
            assert found.prompt_tokens_total == sum(
                len(e.request.prompt_ids) for e in client.opened
            )
