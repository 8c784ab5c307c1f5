"""/health, /status and /metrics render what the scheduler published."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis, ResponseError

from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus
from prism.messages.troubles import read_troubles, write_troubles
from prism.queueing.server import BundledRedis
from prism.transport import malformed_total
from tests.disks import small_disk
from tests.frontend.conftest import Stack, make_config, stack_of
from tests.frontend.scripted_agent import answering


def published(**changes: Any) -> ClusterStatus:
    model = ModelReport("base", "active", waiting=3, kv_mapped_bytes=4096, maps_total=11)
    agent = AgentReport(
        device="host:0",
        epoch=1,
        time_unix_s=time.time(),
        capacity_bytes=1 << 26,
        page_bytes=1 << 16,
        reserved_bytes=5 << 16,
        committed_bytes=2 << 16,
        resident_bytes=1 << 16,
        engines_free=1,
        engines_starting=0,
        engines_total=2,
        models=[model],
    )
    status = ClusterStatus(
        time_unix_s=time.time(),
        policy="prism",
        placement={"base": "host:0"},
        agents=[agent],
        kvpr={"host:0": 0.25},
        unplaced={"chat": 2},
        actions_total={"activate": 4},
        ready=True,
    )
    return msgspec.structs.replace(status, **changes)


async def test_health_follows_the_status(stack: Stack) -> None:
    async def reason() -> str | None:
        response = await stack.client.get("/health")
        assert response.status_code == (200 if response.json()["status"] == "ready" else 503)
        return response.json().get("reason")

    queue = stack.state.queue
    assert await reason() == "starting: the cluster scheduler has not reported yet"
    await queue.publish_status(published(ready=False))
    assert await reason() == "starting: host:0: engines 2/2 up, base active"
    await queue.publish_status(published(ready=False, agents=[]))
    assert await reason() == "starting: host:0: no agent yet"
    await queue.publish_status(published())
    assert await reason() is None
    await queue.publish_status(published(time_unix_s=time.time() - 60, ready=False))
    assert "has not reported for 60 s" in str(await reason())


async def test_a_silent_scheduler_or_part_leaves_a_ready_cluster_degraded(stack: Stack) -> None:
    async def degraded() -> dict[str, str]:
        response = await stack.client.get("/health")
        assert response.status_code == 200
        found: dict[str, str] = response.json().get("degraded", {})
        return found

    queue, run_dir = stack.state.queue, Path(stack.state.live.config.run_dir)
    old = published(time_unix_s=time.time() - 60, degraded={"host:1": "its agent does not report"})
    await queue.publish_status(old)
    found = await degraded()
    assert "has not reported for 6" in found.pop("scheduler")
    assert found == old.degraded
    write_troubles(run_dir, {"scheduler": "ended (signal SIGKILL); it is started again"})
    assert await degraded() == old.degraded | read_troubles(run_dir)
    write_troubles(run_dir, {})
    await queue.publish_status(published())
    assert await degraded() == {}


def _deny(client: Redis) -> None:
    client.acl_setuser("default", enabled=True, commands=["+@all", "-set", "-evalsha", "-eval"])


def _allow(client: Redis) -> None:
    client.acl_setuser("default", enabled=True, commands=["+@all"])


def _change_password(client: Redis, password: str) -> None:
    client.config_set("requirepass", password)
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


Act = Callable[[Redis], object]
# Refused writes, as an operator, a provider or a failover causes them: (begin, end).
REFUSALS: dict[str, tuple[Act, Act]] = {
    "maxmemory": (lambda c: c.config_set("maxmemory", 1), lambda c: c.config_set("maxmemory", 0)),
    "a replica": (lambda c: c.replicaof("127.0.0.1", 1), lambda c: c.replicaof("NO", "ONE")),
    "paused writes": (
        lambda c: c.execute_command("CLIENT", "PAUSE", 60_000, "WRITE"),
        lambda c: c.execute_command("CLIENT", "UNPAUSE"),
    ),
    "too few replicas": (
        lambda c: c.config_set("min-replicas-to-write", 1),
        lambda c: c.config_set("min-replicas-to-write", 0),
    ),
    "no permission": (_deny, _allow),
}


@asynccontextmanager
async def ready_stack(
    namespace: str, folder: Path, directory: Path
) -> AsyncIterator[tuple[Stack, Redis]]:
    """Yields a ready cluster and its separate Redis, whose files are in `directory`."""
    with BundledRedis(directory) as server, Redis.from_url(server.url) as client:
        async with stack_of(make_config(server.url, namespace, folder)) as stack:
            await stack.state.queue.publish_status(published())
            assert (await stack.client.get("/health")).json() == {"status": "ready"}
            yield stack, client


async def refusal(stack: Stack) -> str:
    """Returns the reason of the 503, after the result that is cached for a second has expired."""
    await asyncio.sleep(1.1)
    began_s = time.monotonic()
    answer = await stack.client.get("/health")
    assert time.monotonic() - began_s < 2
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "prism_cluster_ready 0.0" in (await stack.client.get("/metrics")).text.splitlines()
    return str(answer.json()["reason"])


async def await_ready(stack: Stack) -> None:
    until_s = time.monotonic() + 20
    while (await stack.client.get("/health")).status_code != 200:
        assert time.monotonic() < until_s
        await asyncio.sleep(0.1)
    assert "prism_cluster_ready 1.0" in (await stack.client.get("/metrics")).text.splitlines()
    assert not stack.state.dispatcher.broken.is_set()


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_redis_that_takes_no_requests_is_not_ready(
    namespace: str, short_dir: Path, name: str
) -> None:
    refuse, end = REFUSALS[name]
    directory = short_dir / "redis"
    directory.mkdir()
    async with ready_stack(namespace, short_dir, directory) as (stack, client):
        refuse(client)
        assert (await refusal(stack)).startswith("Redis takes no writes: ")
        await asyncio.sleep(2.5)  # past a heartbeat
        await refusal(stack)
        end(client)
        await await_ready(stack)


async def test_a_changed_password_is_not_ready(namespace: str, short_dir: Path) -> None:
    directory = short_dir / "redis"
    directory.mkdir()
    async with ready_stack(namespace, short_dir, directory) as (stack, client):
        before = str(client.config_get("requirepass")["requirepass"])
        _change_password(client, "another")
        assert (await refusal(stack)).startswith("Redis does not answer: ")
        _change_password(client, before)
        await await_ready(stack)


async def test_a_redis_that_hangs_is_not_ready(namespace: str, short_dir: Path) -> None:
    directory = short_dir / "redis"
    directory.mkdir()
    async with ready_stack(namespace, short_dir, directory) as (stack, client):
        pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.1)
            assert (await stack.client.get("/health")).status_code == 503
        finally:
            os.kill(pid, signal.SIGCONT)
        await await_ready(stack)


async def test_a_full_disk_of_redis_is_not_ready(namespace: str, short_dir: Path) -> None:
    directory = short_dir / "redis"
    directory.mkdir()
    with small_disk(directory, 1 << 20):
        async with ready_stack(namespace, short_dir, directory) as (stack, client):
            filler = directory / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 10))
            with suppress(ResponseError):
                client.set("more", bytes(1 << 16))
            assert "MISCONF" in await refusal(stack)
            filler.unlink()
            await await_ready(stack)


async def test_many_probes_are_one_write(namespace: str, short_dir: Path) -> None:
    directory = short_dir / "redis"
    directory.mkdir()
    async with ready_stack(namespace, short_dir, directory) as (stack, client):
        await asyncio.sleep(1.1)
        client.config_resetstat()
        began_s = time.monotonic()
        answers = await asyncio.gather(*(stack.client.get("/health") for _ in range(200)))
        took_s = time.monotonic() - began_s
        assert {answer.status_code for answer in answers} == {200}
        counts = client.info("commandstats")
        # A heartbeat's script sets two keys.
        beats = counts.get("cmdstat_evalsha", {"calls": 0})["calls"]
        assert counts["cmdstat_set"]["calls"] <= 1 + took_s + 2 * beats


async def test_a_busy_frontend_is_ready(stack: Stack) -> None:
    """Pauses of the event loop do not count as Redis's."""
    await stack.state.queue.publish_status(published())
    asked = asyncio.create_task(stack.state.writes.failure())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251
    assert await asked == ""


async def test_status_has_every_field(stack: Stack) -> None:
    assert (await stack.client.get("/status")).status_code == 503
    await stack.state.queue.publish_status(published())
    status = (await stack.client.get("/status")).json()
    assert status["ready"] is True
    assert status["agents"][0]["engine_restarts_total"] == 0
    assert status["agents"][0]["models"][0]["running"] == 0
    assert msgspec.convert(status, ClusterStatus).agents[0].models[0].maps_total == 11


async def test_metrics(stack: Stack) -> None:
    stack.agent.script = answering([7, 8, 0])
    await stack.client.post("/v1/completions", json={"model": "base", "prompt": [9, 9]})
    await stack.state.queue.publish_status(published())
    dropped = float(malformed_total())  # of this process, whatever test it was in
    lines = (await stack.client.get("/metrics")).text.splitlines()
    for line in (
        'prism_requests_total{frontend="f0",model="base",outcome="ok"} 1.0',
        'prism_prompt_tokens_total{frontend="f0",model="base"} 2.0',
        'prism_output_tokens_total{frontend="f0",model="base"} 3.0',
        'prism_ttft_seconds_count{frontend="f0",model="base"} 1.0',
        'prism_slo_total{frontend="f0",met="true",model="base",slo="ttft"} 1.0',
        'prism_open_requests{frontend="f0",model="base"} 0.0',
        f'prism_malformed_messages_total{{frontend="f0",process="frontend"}} {dropped}',
        'prism_malformed_messages_total{process="scheduler"} 0.0',
        "prism_cluster_ready 1.0",
        'prism_placement{device="host:0",model="base"} 1.0',
        'prism_device_resident_bytes{device="host:0"} 65536.0',
        'prism_model_kv_mapped_bytes{device="host:0",model="base"} 4096.0',
        'prism_model_maps_total{device="host:0",model="base"} 11.0',
        'prism_queue_depth{device="host:0"} 3.0',
        'prism_unplaced_requests{model="chat"} 2.0',
        'prism_kvpr{device="host:0"} 0.25',
        'prism_actions_total{action="activate"} 4.0',
    ):
        assert line in lines
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == len(set(heads))
