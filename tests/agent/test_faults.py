"""Engines, frontends, Redis and the agent itself die, hang and recover."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prism.config.resolved import write_resolved
from prism.engines.kv_moves import kv_file
from prism.errors import LeaseLostError
from prism.messages.agent import Drain
from prism.messages.requests import Request
from prism.queueing import BundledRedis
from tests.agent.conftest import FAST
from tests.agent.harness import (
    DEVICE,
    FakeFrontend,
    World,
    make_config,
    until,
    world,
)
from tests.agent.retrying import Retrying

pytestmark = pytest.mark.slow


async def running_requests(
    this: World, count: int, max_tokens: int = 400, prompt_tokens: int = 20
) -> list[Request]:
    """Returns requests of "a" that have their first tokens."""
    requests = await this.frontend.send(
        count, "a", max_tokens=max_tokens, prompt_tokens=prompt_tokens
    )
    await until(lambda: all(this.frontend.stream(r.id).chunks for r in requests))
    return requests


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
async def test_engine_with_four_requests(agent_world: World, how: signal.Signals) -> None:
    """Fails each with a retryable `engine_died`; memory and engine recover, and requests are
    served."""
    await agent_world.serve("a")
    device = agent_world.device
    victims = await running_requests(agent_world, 4, max_tokens=200, prompt_tokens=300)
    pid = agent_world.engine_pid("a")
    before = device.usage()
    os.kill(pid, how)
    streams = [agent_world.frontend.stream(r.id) for r in victims]
    await until(lambda: all(s.ended for s in streams))
    assert [(f.code, f.retryable) for s in streams for f in s.failures] == [
        ("engine_died", True)
    ] * 4
    await until(lambda: agent_world.scheduler.report.engine_restarts_total == 1)
    await until(lambda: agent_world.scheduler.state("a") == "active")
    await until(lambda: agent_world.scheduler.report.engines_free == 1)
    assert pid not in [client.pid for client in device.usage().clients]
    assert device.usage().committed_bytes < before.committed_bytes
    await agent_world.frontend.finish(await agent_world.frontend.send(5))
    await agent_world.stop_agent()
    assert await agent_world.queue.acquire(DEVICE, "next", 5)
    assert await agent_world.queue.depth(DEVICE) == 0


async def test_retried_request_is_served_by_the_next_engine(agent_world: World) -> None:
    await agent_world.serve("a")
    (victim,) = await running_requests(agent_world, 1)
    os.kill(agent_world.engine_pid("a"), signal.SIGKILL)
    await until(lambda: agent_world.frontend.stream(victim.id).failures)
    del agent_world.frontend.streams[victim.id]
    again = msgspec.structs.replace(victim, attempt=2)
    await agent_world.queue.enqueue(again)
    await agent_world.frontend.finish([again])


async def test_model_whose_engines_keep_dying_is_reported_as_failed(
    agent_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRISM_FAKE", json.dumps({"die_at_token": 3}))
    await agent_world.serve("a")
    for _ in range(FAST.revives_max + 1):
        await agent_world.frontend.send(1, max_tokens=8)
        restarts = agent_world.scheduler.report.engine_restarts_total
        await until(lambda n=restarts: agent_world.scheduler.report.engine_restarts_total > n)
    await until(lambda: agent_world.scheduler.state("a") == "failed")
    report = agent_world.scheduler.model("a")
    assert report is not None
    assert "died" in report.error
    await agent_world.scheduler.ready()


async def test_fork_server_dies(agent_world: World) -> None:
    await agent_world.serve("a")
    victims = await running_requests(agent_world, 3)
    assert agent_world.agent is not None
    engine_pid = agent_world.engine_pid("a")
    os.kill(parent_of(engine_pid), signal.SIGKILL)
    await until(lambda: all(agent_world.frontend.stream(r.id).ended for r in victims))
    await until(lambda: agent_world.scheduler.report.engine_restarts_total == 2)
    await until(lambda: agent_world.scheduler.state("a") == "active")
    await agent_world.frontend.finish(await agent_world.frontend.send(3))


async def test_a_fork_server_that_hangs_is_replaced_when_an_engine_is_missing(
    agent_world: World,
) -> None:
    await agent_world.serve("a")
    engine_pid = agent_world.engine_pid("a")
    hung = parent_of(engine_pid)
    os.kill(hung, signal.SIGSTOP)
    await agent_world.frontend.finish(await agent_world.frontend.send(3))
    os.kill(engine_pid, signal.SIGKILL)
    # The model goes to the engine that is left, which ends with the fork server, then to a new one.
    await until(lambda: agent_world.scheduler.report.engine_restarts_total == 3)
    await until(lambda: agent_world.scheduler.state("a") == "active")
    assert parent_of(agent_world.engine_pid("a")) != hung
    await agent_world.frontend.finish(await agent_world.frontend.send(3))


@pytest.mark.parametrize("policy", ["prism", "muxserve"])
async def test_cancelled_requests_end_and_their_memory_comes_back(agent_world: World) -> None:
    await agent_world.serve("a")
    running = await running_requests(agent_world, 4)
    waiting = await agent_world.frontend.send(3, "a", max_tokens=400)
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.waiting == 3)
    ids = [r.id for r in (*running, *waiting)]
    await agent_world.frontend.cancel([*ids, "unknown"])
    streams = [agent_world.frontend.stream(i) for i in ids]
    await until(lambda: all(s.finish_reason == "cancelled" for s in streams))
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.running + m.waiting == 0)
    assert await agent_world.queue.depth(DEVICE) == 0
    await agent_world.frontend.finish(await agent_world.frontend.send(4))


async def test_dead_frontend_is_dropped_and_blocks_nobody(agent_world: World) -> None:
    await agent_world.serve("a")
    dead = FakeFrontend(agent_world.context, agent_world.config, agent_world.queue, "f1")
    dead.close()  # it never takes anything and its heart never beats
    await dead.send(6, "a", max_tokens=400)
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.running == 4)
    await agent_world.frontend.finish(await agent_world.frontend.send(4))
    await until(lambda: (m := agent_world.scheduler.model("a")) and m.running + m.waiting == 0)
    report = agent_world.scheduler.model("a")
    assert report is not None
    assert report.output_tokens_total < 6 * 400
    assert await agent_world.queue.depth(DEVICE) == 0


@pytest.mark.parametrize(
    ("policy", "loses_data"),
    [("prism", False), ("prism", True), ("seallm", False), ("muxserve", True)],
)
async def test_redis_is_away_for_a_while(
    short_dir: Path, namespace: str, policy: str, loses_data: bool
) -> None:
    """Finishes running requests meanwhile and serves waiting ones afterwards, each exactly once."""
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as server:
        config = make_config(short_dir, namespace, server.url, policy=policy)
        async with world(config, FAST) as this:
            await this.serve("a")
            running = await running_requests(this, 4, max_tokens=300)
            waiting = await this.frontend.send(6, max_tokens=20)
            await until(lambda: (m := this.scheduler.model("a")) and m.waiting == 6)
            server.kill()
            if loses_data:
                shutil.rmtree(short_dir / "redis" / "appendonlydir")
            await this.frontend.finish(running)
            await asyncio.sleep(FAST.lease_ttl_s)
            server.start()
            if loses_data:  # the scheduler and the frontends tell it again what they know
                await this.queue.route("a", DEVICE)
                for request in waiting:
                    await this.queue.enqueue(request)
            await this.frontend.finish(waiting)
            await this.frontend.finish(await this.frontend.send(3))
            await until(lambda: (m := this.scheduler.model("a")) and m.finished_total == 13)


async def test_requests_sent_again_while_they_run_do_not_run_twice(
    short_dir: Path, namespace: str
) -> None:
    (short_dir / "redis").mkdir()
    with BundledRedis(short_dir / "redis") as server:
        async with world(make_config(short_dir, namespace, server.url), FAST) as this:
            await this.serve("a")
            running = await running_requests(this, 2, max_tokens=480)
            server.kill()
            shutil.rmtree(short_dir / "redis" / "appendonlydir")
            server.start()
            await this.queue.route("a", DEVICE)
            for request in running:
                await this.queue.enqueue(request)
            await this.frontend.finish(running)
            await until(lambda: (m := this.scheduler.model("a")) and m.finished_total == 2)
            await this.frontend.finish(await this.frontend.send(1))
            await until(lambda: (m := this.scheduler.model("a")) and m.finished_total == 3)
            report = this.scheduler.model("a")
            assert report is not None
            assert report.prompt_tokens_total == 3 * 20


async def test_newer_attempt_replaces_the_one_that_runs(agent_world: World) -> None:
    await agent_world.serve("a")
    (request,) = await running_requests(agent_world, 1)
    again = msgspec.structs.replace(request, attempt=2)
    await agent_world.queue.enqueue(again)
    stream = agent_world.frontend.stream(request.id)
    await until(lambda: stream.chunks and stream.chunks[-1].attempt == 2)
    stream.chunks = [chunk for chunk in stream.chunks if chunk.attempt == 2]
    await agent_world.frontend.finish([again])


async def test_two_agents_never_serve_one_queue(agent_world: World) -> None:
    """Ends this agent if another one took the queue during an outage longer than the lease."""
    await agent_world.serve("a")
    victims = await running_requests(agent_world, 2)
    lost = agent_world.queue
    await lost.release(DEVICE, "nobody", 0)  # not the holder: changes nothing
    with pytest.raises(LeaseLostError):
        await lost.acquire(DEVICE, "second", 30)
    keys = lost._redis
    await keys.delete(f"{agent_world.config.namespace}:lease:{DEVICE}")
    await lost.acquire(DEVICE, "second", 30)
    of_second = agent_world.device
    assert agent_world._running is not None
    with pytest.raises(LeaseLostError, match="held by second"):
        await asyncio.wait_for(agent_world._running, 30)
    agent_world._running = None
    streams = [agent_world.frontend.stream(r.id) for r in victims]
    await until(lambda: all(s.failures or s.finish_reason for s in streams))
    assert not of_second.usage().clients
    of_second.destroy()


async def test_an_agent_that_gets_no_lease_leaves_the_ledger_alone(agent_world: World) -> None:
    agent_world.timing = replace(agent_world.timing, lease_wait_s=0.1)
    await agent_world.queue.acquire(DEVICE, "first", 30)
    agent_world.start_agent()
    of_first = agent_world.device
    assert agent_world._running is not None
    with pytest.raises(LeaseLostError, match="held by first"):
        await asyncio.wait_for(agent_world._running, 30)
    agent_world._running = None
    assert not of_first.usage().clients
    of_first.destroy()


@pytest.mark.parametrize("policy", ["prism", "muxserve"])
async def test_drain_order_finishes_what_runs_and_keeps_what_waits(agent_world: World) -> None:
    await agent_world.serve("a")
    running = await running_requests(agent_world, 4, max_tokens=200)
    waiting = await agent_world.frontend.send(3)
    assert (await agent_world.scheduler.ask(Drain(0, 20.0))).ok
    await agent_world.frontend.finish(running)
    await agent_world.stop_agent()
    assert not kv_segment_exists(agent_world)
    assert await agent_world.queue.depth(DEVICE) == 3
    await agent_world.serve("a")
    await agent_world.frontend.finish(waiting)


async def test_drain_is_bounded(agent_world: World) -> None:
    await agent_world.serve("a")
    running = await running_requests(agent_world, 2, max_tokens=480)
    assert (await agent_world.scheduler.ask(Drain(0, 0.05))).ok
    streams = [agent_world.frontend.stream(r.id) for r in running]
    await until(lambda: all(s.ended for s in streams))
    assert {f.code for s in streams for f in s.failures} == {"agent_stopped"}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def kv_segment_exists(this: World) -> bool:
    return Path(f"/dev/shm/prism-kvcached.{this.config.namespace}.{DEVICE}").exists()


async def test_kv_that_nobody_came_for_goes(
    agent_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removes files of cancelled requests, and of engines that were killed while they wrote."""
    monkeypatch.setattr(kv_file, "ABANDONED_AFTER_S", 100.0)
    folder = Path(agent_world.config.moves_dir)
    left = kv_file.save(str(folder), [np.zeros((4, 4))], 1)
    awaited = kv_file.save(str(folder), [np.zeros((4, 4))], 1)
    os.utime(left, (time.time() - 101.0,) * 2)
    try:
        agent_world.start_agent()
        await until(lambda: os.listdir(folder) == [os.path.basename(awaited)])
    finally:
        shutil.rmtree(folder)


async def test_a_malformed_entry_is_moved_away_and_ends_by_name(agent_world: World) -> None:
    """Fails with `malformed_request` at the frontend, which has the whole request.

    The reader of the queue continues.
    """
    await agent_world.serve("a")
    await agent_world.queue._run("enqueue", 2, 1000, "broken", "a", 1, b"\xc1 no request", "")
    await agent_world.frontend.finish(await agent_world.frontend.send(3))
    await until(lambda: agent_world.frontend.stream("broken").failures)
    (failure,) = agent_world.frontend.stream("broken").failures
    assert (failure.code, failure.retryable) == ("malformed_request", True)
    assert await agent_world.queue.depth(DEVICE) == 0
    await until(lambda: agent_world.scheduler.report.malformed_total == 1)


@pytest.mark.parametrize(("policy", "marked"), [("prism", 0), ("prism", 7), ("muxserve", 7)])
async def test_a_request_that_kills_engines_ends_by_name_and_the_others_finish(
    short_dir: Path,
    namespace: str,
    redis_server: BundledRedis,
    monkeypatch: pytest.MonkeyPatch,
    *,
    policy: str,
    marked: int,
) -> None:
    """Covers one guilty request of 16: it kills two engines and is not tried on a third."""
    size_bytes = 32 << 20
    made = make_config(short_dir, namespace, redis_server.url, size_bytes, policy=policy)
    engine = msgspec.structs.replace(made.engine, max_running=16)
    config = msgspec.structs.replace(made, engine=engine)
    write_resolved(config, short_dir / "cluster.json")
    monkeypatch.setenv("PRISM_FAKE", json.dumps({"die_on_prompt_token": 7, "decode_step_ms": 2}))
    async with world(config, FAST) as this:
        await this.serve("a")
        this.stop_listening()
        frontend = Retrying(this)
        receiver = asyncio.create_task(frontend.receive())
        requests = [this.frontend.request("a", max_tokens=20) for _ in range(16)]
        guilty = msgspec.structs.replace(requests[marked], prompt_ids=[7] * 20)
        requests[marked] = guilty
        for request in requests:
            frontend.send(request)
        streams = this.frontend.streams
        await until(lambda: guilty.id in frontend.ended_by)
        assert frontend.ended_by == {guilty.id: "request_killed_engines"}
        others = [r for r in requests if r is not guilty]
        await until(lambda: all(r.id in streams and streams[r.id].ended for r in others))
        await this.frontend.finish(others)
        receiver.cancel()
        await until(lambda: this.scheduler.report.engine_restarts_total >= 2)
        assert this.scheduler.report.engine_restarts_total == 2
