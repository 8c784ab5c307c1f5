"""Operators drain devices: models leave, none arrives, and a restarted scheduler still drains."""

from __future__ import annotations

import asyncio

import pytest

from prism.cluster.operator_commands import Operator
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.queueing.request_queue import RequestQueue
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually


async def left(cluster: Cluster, device: str) -> str | None:
    return (await cluster.status()).drained.get(device)


async def test_models_move_and_nothing_comes_until_undrained(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(2.0, 2.0))
    await cluster.start()
    assert cluster.active() == {"host:0": {"a"}, "host:1": {"b"}}
    result = await cluster.command("drain", device="host:0")
    assert result.ok, result.message
    await eventually(lambda: cluster.active() == {"host:0": set(), "host:1": {"a", "b"}})

    async def empty() -> bool:
        return await left(cluster, "host:0") == ""

    await eventually(empty)
    refused = await cluster.command("activate", model="a", device="host:0")
    assert refused.message.startswith("host:0 is drained; run prism-serve undrain")
    assert (await cluster.command("evict", model="a")).ok
    await cluster.serves("a")
    assert "a" in cluster.active()["host:1"]
    assert (await cluster.command("undrain", device="host:0")).ok
    assert await left(cluster, "host:0") is None
    moved = await cluster.command("activate", model="a", device="host:0")
    assert moved.message == "a moved to host:0"


async def test_a_scheduler_that_is_started_again_goes_on(cluster: Cluster) -> None:
    cluster.configure(spec("a", never_evict=True), rooms=(1.0, 1.0))
    await cluster.start()
    home = (await cluster.queue.placement())["a"][0]
    other = cluster.agents[({"host:0", "host:1"} - {home}).pop()]
    other.stuck.add("a")
    assert (await cluster.command("drain", device=home)).ok
    await eventually(lambda: "a" in other.residents)
    assert await left(cluster, home) == f"a moves to {other.device}"
    await cluster.stop_scheduler()
    other.stuck.clear()
    cluster.start_scheduler()

    async def empty() -> bool:
        return await left(cluster, home) == ""

    await eventually(empty)
    assert cluster.active() == {home: set(), other.device: {"a"}}


async def test_undrain_is_kept_by_a_scheduler_that_has_just_begun(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends the command before the scheduler has read its predecessor's state."""
    cluster.configure(spec("a"), rooms=(1.0, 1.0))
    await cluster.start()
    assert (await cluster.command("drain", device="host:0")).ok
    await cluster.stop_scheduler()
    came, read, take = asyncio.Event(), RequestQueue.status, Operator.take

    async def late(queue: RequestQueue) -> ClusterStatus | None:
        await came.wait()
        return await read(queue)

    def taken(operator: Operator, identity: bytes, command: OperatorCommand) -> None:
        take(operator, identity, command)
        came.set()

    monkeypatch.setattr(RequestQueue, "status", late)
    monkeypatch.setattr(Operator, "take", taken)
    cluster.start_scheduler()
    assert (await cluster.command("undrain", device="host:0")).ok
    assert (await cluster.status()).drained == {}


async def test_without_room_it_waits_and_says_why(cluster: Cluster) -> None:
    cluster.configure(
        spec("a", never_evict=True), spec("b", never_evict=True), rooms=(1.0, 1.0), engines=1
    )
    await cluster.start()
    home = (await cluster.queue.placement())["a"][0]
    assert (await cluster.command("drain", device=home)).ok
    orders = list(cluster.orders())
    await asyncio.sleep(0.5)  # several plans
    assert cluster.orders() == orders
    assert await left(cluster, home) == (
        "a must stay up (never_evict or replicas.min); it moves when another device has room"
    )


async def test_a_fixed_partition_cannot_be_drained(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,), policy="static")
    await cluster.start()
    result = await cluster.command("drain", device="host:0")
    why = "the policy static never moves a model once it is placed; use another policy"
    assert result.message == f"drain: {why}"
    assert (await cluster.command("drain")).message == "drain: name a device"
