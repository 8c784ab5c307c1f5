"""A hundred orders to real engines, faster than they can be answered."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from prism.config.resolved import write_resolved
from prism.messages.requests import Request
from prism.queueing import BundledRedis
from tests.agent.hammering import check_answers, hammer
from tests.agent.harness import DEVICE, World, make_config, until, world
from tests.sglang.models import GPT2, LLAMA, MOE, greedy, prompts, spec_of

NAMES = (LLAMA, GPT2, MOE.name)

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(1200)]


async def serve_right(this: World, name: str) -> None:
    result = await this.scheduler.activate(name)
    assert result.ok, result.message
    await this.queue.route(name, DEVICE)
    [prompt] = prompts(name, 1, (40, 40))
    blank: Request = this.frontend.request(name, max_tokens=12)
    asked = msgspec.structs.replace(blank, prompt_ids=prompt)
    await this.queue.enqueue(asked)
    stream = this.frontend.stream(asked.id)
    await until(lambda: stream.ended)
    assert stream.token_ids == greedy(name, prompt, 12), name


async def test_a_hundred_rapid_orders_on_real_engines(
    redis_server: BundledRedis, short_dir: Path, namespace: str, tmp_path: Path
) -> None:
    config = make_config(short_dir, namespace, redis_server.url, capacity_bytes=192 << 20)
    engine = msgspec.structs.replace(
        config.engine, adapter="sglang", weight_store=str(tmp_path / "store")
    )
    models = [spec_of(name) for name in NAMES]
    config = msgspec.structs.replace(config, models=models, engine=engine)
    write_resolved(config, short_dir / "cluster.json")
    async with world(config) as this:
        this.start_agent()
        await until(lambda: this.scheduler.reports, 900)
        await until(lambda: this.scheduler.report.engines_free == 2, 900)
        results = await hammer(this, 100, random.Random(100), 0.3)
        check_answers(this, results, 100)
        for name in NAMES:
            assert (await this.scheduler.evict(name)).ok
        assert this.device.usage().reserved_bytes == 0
        for name in NAMES:
            await serve_right(this, name)
            assert (await this.scheduler.evict(name)).ok
        assert (this.device.usage().reserved_bytes, this.device.resident_bytes()) == (0, 0)
