"""Everything goes wrong in a random order; every request still ends with exactly its tokens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prism.errors import QueueUnavailableError
from prism.messages import EngineOutput, Request
from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import DEVICE, Stream, World, make_config, until, world

MODELS = ("a", "b")


class Retrying:
    """What a frontend does: it keeps its requests and sends them again after a failure that may
    be retried; what older attempts still say is dropped."""

    def __init__(self, this: World) -> None:
        self._world = this
        self.open: dict[str, Request] = {}
        self.retries = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self) -> None:
        inbox = self._world.frontend._inbox
        while True:
            output = msgspec.msgpack.decode(await inbox.recv(), type=EngineOutput)
            for chunk in output.chunks:
                if self.open[chunk.request_id].attempt == chunk.attempt:
                    self._world.frontend.stream(chunk.request_id).chunks.append(chunk)
            for failure in output.failures:
                if self.open[failure.request_id].attempt == failure.attempt:
                    assert failure.retryable, failure
                    self._again(failure.request_id)

    def _again(self, request_id: str) -> None:
        self.retries += 1
        request = self.open[request_id]
        self.open[request_id] = msgspec.structs.replace(request, attempt=request.attempt + 1)
        self._world.frontend.streams[request_id] = Stream()
        self.send(self.open[request_id])

    def send(self, request: Request) -> None:
        self.open[request.id] = request
        task = asyncio.create_task(self._enqueue(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enqueue(self, request: Request) -> None:
        while True:
            try:
                await self._world.queue.enqueue(request)
            except QueueUnavailableError:
                await asyncio.sleep(0.05)
            else:
                return


async def kill_engine(this: World, _: BundledRedis, rng: random.Random) -> None:
    model = rng.choice(MODELS)
    if this.scheduler.state(model) == "active":
        report = this.scheduler.model(model)
        if report and report.engine_pid:
            with suppress(ProcessLookupError):  # it died since it was reported
                os.kill(report.engine_pid, rng.choice([signal.SIGKILL, signal.SIGTERM]))


async def restart_redis(_: World, server: BundledRedis, rng: random.Random) -> None:
    server.kill()
    await asyncio.sleep(rng.random() * 0.5)
    server.start()


async def move(this: World, _: BundledRedis, rng: random.Random) -> None:
    """Away and back, as the cluster scheduler would."""
    model = rng.choice(MODELS)
    await this.queue.route(model, None)
    await this.scheduler.evict(model)
    await this.scheduler.activate(model)
    await this.queue.route(model, DEVICE)


@pytest.mark.parametrize("seed", [1, 2])
async def test_storm(short_dir: Path, namespace: str, seed: int) -> None:
    rng = random.Random(seed)
    (short_dir / "redis").mkdir()
    timing = replace(FAST, revives_max=1000)
    with BundledRedis(short_dir / "redis") as server:
        async with world(make_config(short_dir, namespace, server.url), timing) as this:
            await this.serve(*MODELS)
            this.stop_listening()
            frontend = Retrying(this)
            receiver = asyncio.create_task(frontend.receive())
            for _ in range(12):
                for _ in range(4):
                    options = {"prompt_tokens": rng.randint(2, 300)}
                    model = rng.choice(MODELS)
                    frontend.send(
                        this.frontend.request(model, max_tokens=rng.randint(1, 150), **options)
                    )
                await asyncio.sleep(rng.random() * 0.3)
                fault = rng.choice([kill_engine, kill_engine, restart_redis, move])
                await fault(this, server, rng)
            streams = this.frontend.streams
            await until(lambda: all(i in streams and streams[i].ended for i in frontend.open), 120)
            await this.frontend.finish(list(frontend.open.values()))
            receiver.cancel()
            assert this.scheduler.report.engine_restarts_total > 0
            assert frontend.retries > 0
            await until(
                lambda: all(m.running + m.waiting == 0 for m in this.scheduler.report.models)
            )
