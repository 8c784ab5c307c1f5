"""Copies of a model in bad times: engines, agents and Redis fail, operators evict."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.conftest import TIMING, Cluster, spec
from tests.cluster.scripted import eventually


async def copies(cluster: Cluster, count: int, devices: int) -> None:
    """Starts `count` copies of model a on `devices` devices with room for one each."""
    cluster.configure(spec("a", replicas_min=count, replicas_max=devices), rooms=(1.0,) * devices)
    await cluster.start()
    await eventually(lambda: routed(cluster, *range(count)))


async def routed(cluster: Cluster, *numbers: int) -> bool:
    placed = (await cluster.queue.placement()).get("a", ())
    return sorted(placed) == [f"host:{number}" for number in numbers]


async def two_and_one_that_comes(cluster: Cluster) -> None:
    cluster.configure(spec("a", replicas_min=3, replicas_max=3), rooms=(1.0,) * 3)
    cluster.start_scheduler()
    for number in range(3):
        stuck = {"a"} if number == 2 else set()
        await cluster.start_agent(f"host:{number}", stuck=stuck)
    await eventually(lambda: routed(cluster, 0, 1))
    await eventually(lambda: cluster.agents["host:2"].residents)


async def test_a_lost_copy_is_left_while_another_one_comes(cluster: Cluster) -> None:
    await two_and_one_that_comes(cluster)
    await cluster.kill_agent("host:1")
    await eventually(lambda: routed(cluster, 0), TIMING.activation_s / 2)
    for _ in range(3):
        await cluster.serves("a")
    assert cluster.agents["host:2"].residents["a"].state == "activating"
    cluster.agents["host:2"].stuck.clear()
    await eventually(lambda: routed(cluster, 0, 2))


@pytest.mark.parametrize("coming", [False, True])
async def test_copies_stay_where_redis_lost_the_placement(cluster: Cluster, coming: bool) -> None:
    await (two_and_one_that_comes(cluster) if coming else copies(cluster, 2, 2))
    await cluster.queue.route("a")
    await eventually(lambda: routed(cluster, 0, 1))
    if coming:
        cluster.agents["host:2"].stuck.clear()
        await eventually(lambda: routed(cluster, 0, 1, 2))
    await asyncio.sleep(0.3)
    assert ("evict", "a") not in cluster.orders()


async def test_a_copy_whose_engine_died_attracts_nothing_and_joins_again(cluster: Cluster) -> None:
    await copies(cluster, 2, 3)
    orders = len(cluster.orders())
    resident = cluster.agents["host:1"].residents["a"]
    resident.state = "activating"
    await cluster.agents["host:1"].report()
    await eventually(lambda: routed(cluster, 0))
    for _ in range(3):
        assert await cluster.send("a") == "host:0"
    await asyncio.sleep(0.5)
    resident.state = "active"
    await eventually(lambda: routed(cluster, 0, 1))
    assert len(cluster.orders()) == orders, "neither evicted nor brought up elsewhere meanwhile"


async def test_all_copies_leave_at_once_when_an_operator_evicts(cluster: Cluster) -> None:
    await copies(cluster, 2, 2)
    for agent in cluster.agents.values():
        agent.delay_s = 0.5
    orders = len(cluster.orders())
    command = asyncio.create_task(cluster.command("evict", model="a"))

    def both_leave() -> bool:
        states = [r.state for agent in cluster.agents.values() for r in agent.residents.values()]
        return states == ["draining", "draining"]

    await eventually(both_leave)
    answer = await command
    assert (answer.ok, answer.message) == (True, "a evicted from host:0, host:1")
    assert cluster.active() == {"host:0": set(), "host:1": set()}
    assert cluster.orders().count(("evict", "a")) == 2
    assert len(cluster.orders()) == orders + 2, "no copy is made up for one that left first"
    await cluster.serves("a")
