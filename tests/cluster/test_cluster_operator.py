"""Operators' commands over the scheduler's socket."""

from __future__ import annotations

import asyncio

import msgspec

from prism.messages.cluster import ClusterStatus
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually


async def test_evict_and_activate(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    result = await cluster.command("evict", model="a")
    assert (result.ok, result.message) == (True, "a evicted from host:0")
    assert agent.active() == set()
    assert await cluster.queue.placement() == {}
    await asyncio.sleep(0.4)
    assert agent.active() == set(), "an evicted model is absent until a request arrives"
    assert (await cluster.command("evict", model="a")).message == "a is not active"
    result = await cluster.command("activate", model="a")
    assert (result.ok, result.message) == (True, "a is active on host:0")
    assert agent.active() == {"a"}
    assert (await cluster.command("activate", model="a")).message == "a is active on host:0"


async def test_activate_on_a_named_device_moves_the_model(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0, 1.0))
    await cluster.start()
    home = (await cluster.queue.placement())["a"][0]
    other = ({"host:0", "host:1"} - {home}).pop()
    result = await cluster.command("activate", model="a", device=other)
    assert (result.ok, result.message) == (True, f"a moved to {other}")
    assert cluster.active() == {home: set(), other: {"a"}}
    await cluster.serves("a")


async def test_activate_makes_room_like_a_request(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(1.0,))
    await cluster.start()
    absent = ({"a", "b"} - cluster.agents["host:0"].active()).pop()
    await asyncio.sleep(1.2)  # a model that just came up is protected for a moment
    result = await cluster.command("activate", model=absent)
    assert result.ok, result.message
    assert cluster.agents["host:0"].active() == {absent}


async def test_what_cannot_be_done_is_answered_with_the_reason(cluster: Cluster) -> None:
    kept = spec("kept", never_evict=True, pinned_device="host:0")
    cluster.configure(kept, spec("broken"), rooms=(2.0, 0.5))
    cluster.start_scheduler()
    await cluster.start_agent("host:0", failing={"broken": "bad weights"})
    await cluster.start_agent("host:1")
    await eventually(cluster.ready)

    async def message(kind: str, **more: str) -> str:
        result = await cluster.command(kind, **more)
        assert not result.ok
        return result.message

    assert "'x' is not a configured model; models: kept, broken" in await message(
        "activate", model="x"
    )
    assert "a configured device; devices: host:0, host:1" in await message(
        "activate", model="kept", device="host:7"
    )
    assert "pinned to host:0" in await message("activate", model="kept", device="host:1")
    assert "never_evict" in await message("evict", model="kept")
    assert "name a model" in await message("evict")
    assert "'dance' is not a command" in await message("dance")
    assert "bad weights" in await message("activate", model="broken")
    assert "bytes" in await message("activate", model="broken", device="host:1")


async def test_flush_trims_devices_or_one_model(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(1.0, 1.0))
    await cluster.start()
    result = await cluster.command("flush")
    assert result.message == "host:0: trimmed 7 bytes; host:1: trimmed 7 bytes"
    home = (await cluster.queue.placement())["a"][0]
    assert (await cluster.command("flush", model="a")).message == f"{home}: trimmed 7 bytes"
    assert cluster.agents[home].orders[-1] == ("trim", "a")
    await cluster.command("evict", model="a")
    assert not (await cluster.command("flush", model="a")).ok


async def test_status_is_what_is_published(cluster: Cluster) -> None:
    cluster.configure(spec("a"))
    await cluster.start()
    await cluster.serves("a")
    result = await cluster.command("status")
    status = msgspec.json.decode(result.message, type=ClusterStatus)
    assert status.ready
    assert status.placement == {"a": "host:0"}
    assert status.policy == "prism"

    async def rate() -> float:
        return (await cluster.status()).token_rates.get("a", 0.0)

    assert await eventually(rate) > 0
    assert [a.device for a in status.agents] == ["host:0"]


async def test_prefetch_asks_one_machine_or_all(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0, 1.0))
    await cluster.start()
    result = await cluster.command("prefetch", model="a")
    assert (result.ok, result.message) == (True, "host:0: read; host:1: read")
    cluster.agents["host:1"].unreadable.add("a")
    result = await cluster.command("prefetch", model="a", device="host:1")
    assert (result.ok, result.message) == (False, "host:1: cut short")
    asked = [agent.orders.count(("prefetch", "a")) for agent in cluster.agents.values()]
    assert asked == [1, 2]
