"""Random faults in random order; every request still ends with exactly its tokens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import DEVICE, World, make_config, until, world
from tests.agent.retrying import Retrying

pytestmark = pytest.mark.slow

MODELS = ("a", "b")


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
    """Evicts a model and activates it again, as the cluster scheduler would."""
    model = rng.choice(MODELS)
    await this.queue.route(model)
    await this.scheduler.evict(model)
    await this.scheduler.activate(model)
    await this.queue.route(model, DEVICE)


@pytest.mark.parametrize(("policy", "seed"), [("prism", 1), ("prism", 2), ("muxserve", 3)])
async def test_storm(short_dir: Path, namespace: str, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    (short_dir / "redis").mkdir()
    timing = replace(FAST, revives_max=1000)
    with BundledRedis(short_dir / "redis") as server:
        config = make_config(short_dir, namespace, server.url, policy=policy)
        async with world(config, timing) as this:
            await this.serve(*MODELS)
            this.stop_listening()
            frontend = Retrying(this, keeps_blame=False)  # external kills blame no request
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
            assert frontend.ended_by == {}
            await until(
                lambda: all(m.running + m.waiting == 0 for m in this.scheduler.report.models)
            )
