"""Policies that assign requests to devices, in a cluster of scripted agents."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prism.queueing import UNPLACED
from tests.cluster.conftest import Cluster, spec
from tests.cluster.scripted import eventually

pytestmark = pytest.mark.slow

MANY = 10000
SCHEDULER = {"search_interval_s": None}


def configure(cluster: Cluster, names: str, rooms: tuple[float, ...], **more: object) -> None:
    models = [spec(name) for name in names]
    cluster.configure(*models, rooms=rooms, policy="qlm", scheduler=SCHEDULER, **more)


def has(cluster: Cluster, device: str, *models: str) -> Callable[[], bool]:
    return lambda: cluster.active()[device] == set(models)


async def test_models_follow_the_requests_that_wait(cluster: Cluster) -> None:
    """Starts with one model a device. No request goes to a device before it is bound there."""
    configure(cluster, "abc", rooms=(1.0, 1.0))
    await cluster.start()
    assert sorted(name for (name,) in cluster.active().values()) == ["a", "b"]
    assert await cluster.send("a") == UNPLACED
    await eventually(lambda: cluster.finished("a") == 1)
    await cluster.serves("c")
    for name in "abcab":
        await cluster.serves(name)


async def test_an_instance_is_swapped_once_it_has_no_open_requests(cluster: Cluster) -> None:
    """Counts those that were moved to the device before a report shows them."""
    configure(cluster, "ab", rooms=(1.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    agent.serving = False
    first = next(iter(agent.active()))
    other = "b" if first == "a" else "a"
    for name in (first, first, other):
        await cluster.send(name)

    async def bound() -> bool:
        return await cluster.queue.depth("host:0") == 2

    await eventually(bound)
    assert (await cluster.queue.unplaced_counts()) == {other: 1}
    assert agent.active() == {first}
    agent.serving = True
    await eventually(lambda: cluster.finished(other) == 1)
    assert agent.orders == [("activate", first), ("evict", first), ("activate", other)]
    assert cluster.finished(first) == 2


async def test_a_model_is_on_as_many_devices_as_have_its_requests(cluster: Cluster) -> None:
    """Puts each of its groups on the first idle instance, whatever `replicas.max` is."""
    cluster.configure(spec("a"), rooms=(1.0, 1.0), policy="qlm-first-idle", scheduler=SCHEDULER)
    await cluster.start()
    for agent in cluster.agents.values():
        agent.serving = False
    for _ in range(70):  # a group has 64 requests
        await cluster.send("a")
    await eventually(lambda: list(cluster.active().values()) == [{"a"}, {"a"}])
    for agent in cluster.agents.values():
        agent.serving = True
    await eventually(lambda: cluster.finished("a") == 70)
    assert (await cluster.status()).copies == {"a": ("host:0", "host:1")}


async def test_a_new_scheduler_has_all_that_waits(cluster: Cluster) -> None:
    configure(cluster, "ab", rooms=(1.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    agent.serving = False
    for number in range(40):
        await cluster.send("ab"[number % 2])
    await cluster.stop_scheduler()
    agent.serving = True
    cluster.start_scheduler()
    await eventually(lambda: (cluster.finished("a"), cluster.finished("b")) == (20, 20))


async def test_requests_of_a_lost_agent_go_to_another_device(cluster: Cluster) -> None:
    """Includes those that were moved to its queue."""
    configure(cluster, "ab", rooms=(1.0, 1.0))
    await cluster.start()
    home = next(d for d, models in cluster.active().items() if "a" in models)
    cluster.agents[home].serving = False
    await cluster.send("a")

    async def bound() -> bool:
        return await cluster.queue.depth(home) == 1

    await eventually(bound)
    await cluster.kill_agent(home)
    await cluster.send("a")
    await eventually(lambda: cluster.finished("a") == 2, 60)


async def test_cancelled_requests_leave_the_queues(cluster: Cluster) -> None:
    """Swaps in no model for them."""
    configure(cluster, "ab", rooms=(1.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    (first,) = agent.active()
    other = "b" if first == "a" else "a"
    agent.serving = False
    await cluster.send(first)
    for _ in range(3):
        await cluster.send(other)

    async def seen(count: int) -> bool:
        status = await cluster.status()
        return status.unplaced.get(other, 0) == count

    await eventually(lambda: seen(3))
    assert len(await cluster.queue.forget([f"r{n}" for n in range(1, 4)])) == 3
    await eventually(lambda: seen(0))
    agent.serving = True
    await eventually(lambda: cluster.finished(first) == 1)
    await cluster.serves(first)
    assert ("activate", other) not in agent.orders


async def test_a_model_that_no_instance_holds_is_refused(cluster: Cluster) -> None:
    large = spec("large", weight_bytes=40960 * 8)
    cluster.configure(spec("a"), large, rooms=(1.0,), policy="qlm", scheduler=SCHEDULER)
    await cluster.start()
    await cluster.send("large")
    assert await cluster.refusal("large") == "no serving instance can hold it"
    await cluster.serves("a")


async def test_a_drained_device_gives_up_its_instance(cluster: Cluster) -> None:
    configure(cluster, "ab", rooms=(1.0, 1.0))
    await cluster.start()
    assert (await cluster.command("drain", device="host:0")).ok
    await eventually(has(cluster, "host:0"))
    for name in "abab":
        await cluster.serves(name)
    assert (await cluster.command("undrain", device="host:0")).ok

    async def has_both() -> bool:
        await cluster.serves("a")
        await cluster.serves("b")
        return all(cluster.active().values())

    await eventually(has_both)


async def test_requests_follow_the_placement_under_the_next_policy(cluster: Cluster) -> None:
    configure(cluster, "ab", rooms=(2.0,))
    await cluster.start()
    agent = cluster.agents["host:0"]
    agent.serving = False
    await cluster.send("b")
    await cluster.send("a")
    await cluster.stop_scheduler()
    cluster.configure(spec("a"), spec("b"), rooms=(2.0,))
    cluster.start_scheduler()
    agent.serving = True
    await eventually(lambda: (cluster.finished("a"), cluster.finished("b")) == (1, 1))
    assert await cluster.send("a") == "host:0"


async def test_ten_thousand_wait_and_none_is_lost(cluster: Cluster) -> None:
    """Restarts the scheduler among them."""
    configure(cluster, "abc", rooms=(1.0, 1.0))
    await cluster.start()
    for agent in cluster.agents.values():
        agent.serving = False
    await cluster.send("a")
    sent = [cluster.request("abc"[number % 3]) for number in range(MANY)]
    for start in range(0, MANY, 500):
        await cluster.queue.enqueue_all(sent[start : start + 500])
    await cluster.stop_scheduler()
    cluster.start_scheduler()

    async def all_seen() -> bool:
        bound = [await cluster.queue.depth(device) for device in cluster.agents]
        return sum(bound) + sum((await cluster.status()).unplaced.values()) == MANY + 1

    await eventually(all_seen, 60)
    for agent in cluster.agents.values():
        agent.serving = True
    await eventually(lambda: sum(cluster.finished(name) for name in "abc") == MANY + 1, 60)
