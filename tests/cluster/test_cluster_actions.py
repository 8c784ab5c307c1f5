"""The scheduler's process in good times: start, arrivals, eviction, migration, static."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.cluster.conftest import MODEL_BYTES, Cluster, spec
from tests.cluster.scripted import ScriptedAgent, eventually

pytestmark = pytest.mark.slow


async def test_start_places_every_model_that_fits(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), spec("c"), rooms=(2.0, 1.0))
    await cluster.start()
    active = cluster.active()
    assert sorted(map(len, active.values())) == [1, 2]
    assert set.union(*active.values()) == {"a", "b", "c"}
    placement = await cluster.queue.placement()
    assert placement == {m: (d,) for d, models in active.items() for m in models}
    status = await cluster.status()
    assert status.actions_total["activate"] == 3
    assert set(status.kvpr) == {"host:0", "host:1"}


async def test_not_ready_before_engines_and_activations_are(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(2.0, 2.0))
    cluster.start_scheduler()
    first = await cluster.start_agent("host:0", engines_starting=2)
    await asyncio.sleep(0.3)
    assert not (await cluster.status()).ready
    second = await cluster.start_agent("host:1", stuck={"a"})
    second.engines_starting = 0
    first.engines_starting = 0
    first.stuck.add("a")
    await eventually(cluster.orders)
    await asyncio.sleep(0.3)
    assert not (await cluster.status()).ready
    first.stuck.clear()
    second.stuck.clear()
    await eventually(cluster.ready)


async def test_engines_that_are_starting_count_and_no_more(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), engines=1)
    cluster.start_scheduler()
    agent = await cluster.start_agent("host:0", engines_starting=1)
    await eventually(lambda: agent.orders == [("activate", "a")])
    await cluster.send("b")
    await asyncio.sleep(0.5)
    assert agent.orders == [("activate", "a")]
    agent.engines_starting = 0
    await eventually(lambda: cluster.finished("b"))


async def test_arrival_activates_an_absent_model(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), spec("c"), rooms=(2.0,), engines=3)
    await cluster.start()
    absent = ({"a", "b", "c"} - cluster.agents["host:0"].active()).pop()
    assert absent not in await cluster.queue.placement()
    assert await cluster.send(absent) == "unplaced"
    await eventually(lambda: cluster.finished(absent))
    kinds = [kind for kind, _ in cluster.orders()]
    assert kinds == ["activate", "activate", "evict", "activate"]


async def test_requests_wait_at_the_device_while_a_model_comes_up(cluster: Cluster) -> None:
    cluster.configure(spec("a"), rooms=(1.0,))
    await cluster.start()
    await cluster.command("evict", model="a")
    agent = cluster.agents["host:0"]
    agent.stuck.add("a")
    await cluster.send("a")
    await eventually(lambda: agent.orders[-1] == ("activate", "a"))
    await eventually(lambda: cluster.queue.depth("host:0"))
    assert await cluster.send("a") == "host:0"
    agent.stuck.clear()
    await eventually(lambda: cluster.finished("a") == 2)


async def test_models_take_turns_on_a_device_for_one(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(1.5,))
    await cluster.start()
    for _ in range(3):
        await cluster.serves("a")
        await cluster.serves("b")
    status = await cluster.status()
    assert status.actions_total["evict"] >= 5
    assert not status.unplaced


async def test_a_place_is_free_when_an_idle_time_is_reached_not_a_look_later(
    cluster: Cluster,
) -> None:
    """Reports once a minute, so that only the policy's next plan time wakes the scheduler."""
    config = cluster.configure(spec("a"), spec("b"), rooms=(1.5,))
    cluster.config = structs.replace(config, report_interval_s=60.0)
    await cluster.start()
    await cluster.serves("a")
    await cluster.serves("b")


async def test_an_idle_model_stays_on_a_full_device_until_another_is_asked_for(
    cluster: Cluster,
) -> None:
    cluster.configure(
        spec("a"), spec("b"), rooms=(1.04,), scheduler={"idle_threshold_s": 0.2, "interval_s": 0.1}
    )
    await cluster.start()
    await cluster.serves("a")
    await asyncio.sleep(1.0)
    assert [kind for kind, _ in cluster.orders()] == ["activate"]
    await cluster.serves("b")
    assert cluster.orders()[-2:] == [("evict", "a"), ("activate", "b")]


async def test_a_model_without_room_at_the_start_is_activated_once_there_is_room(
    cluster: Cluster,
) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(1.04,), scheduler={"interval_s": 0.1})
    await cluster.start()
    (first,) = cluster.active()["host:0"]
    other = {"a": "b", "b": "a"}[first]
    assert (await cluster.command("evict", model=first)).ok
    await eventually(lambda: cluster.active()["host:0"] == {other})


async def test_never_evict_is_kept_and_the_refusal_says_why(cluster: Cluster) -> None:
    cluster.configure(spec("kept", never_evict=True), spec("b"), rooms=(1.5,))
    await cluster.start()
    assert cluster.agents["host:0"].active() == {"kept"}
    await cluster.send("b")

    missing = 2 * MODEL_BYTES - cluster.config.devices[0].capacity_bytes

    async def unplaced() -> bool:
        return (await cluster.status()).unplaced == {"b": 1}

    assert (await cluster.refusal("b")).startswith(f"{missing} bytes")
    await eventually(unplaced)
    assert cluster.orders() == [("activate", "kept")]


async def test_the_static_policy_splits_and_keeps(cluster: Cluster) -> None:
    models = [spec("a"), spec("b", static_share=0.6), spec("c")]
    cluster.configure(*models, rooms=(2.5, 1.0), policy="static")
    await cluster.start()
    for name in "abc":
        await cluster.serves(name)
    residents = cluster.agents["host:0"].residents
    assert len(residents) == 2
    shared = cluster.config.devices[0].capacity_bytes - 2 * 40960
    limits = {name: r.kv_limit_bytes for name, r in residents.items()}
    assert limits["b"] == int(shared * 0.6)
    assert sum(limits.values()) <= shared
    assert [kind for kind, _ in cluster.orders()] == ["activate"] * 3


async def test_migration_is_make_before_break(cluster: Cluster) -> None:
    every = {"contended_requests": 0.0}
    cluster.configure(spec("hot"), spec("warm"), rooms=(3.0, 0.5), engines=3, scheduler=every)
    await cluster.start()
    assert cluster.active()["host:0"] == {"hot", "warm"}
    await cluster.kill_agent("host:1")
    await cluster.stop_scheduler()
    # The second device grows, so that moving one of the two halves the pressure.
    cluster.configure(spec("hot"), spec("warm"), rooms=(3.0, 3.0), engines=3, scheduler=every)
    cluster.start_scheduler()
    await cluster.start_agent("host:1")
    first, second = cluster.agents["host:0"], cluster.agents["host:1"]
    second.stuck = {"hot", "warm"}
    await cluster.serves("hot")
    await cluster.serves("warm")

    async def busy() -> bool:
        await cluster.send("hot")
        await cluster.send("warm")
        return bool(second.orders)

    await eventually(busy)
    moved = second.orders[0][1]
    assert (await cluster.queue.placement())[moved] == ("host:0",)
    served = first.finished[moved]
    await cluster.send(moved)
    await eventually(lambda: first.finished[moved] > served)
    assert not [order for order in first.orders if order[0] == "evict"]
    second.stuck.clear()
    await eventually(lambda: moved in second.active() and moved not in first.residents)
    assert (await cluster.queue.placement())[moved] == ("host:1",)
    await cluster.serves(moved)

    async def counted() -> bool:
        return (await cluster.status()).actions_total.get("migrate") == 1

    await eventually(counted)


async def test_what_must_wait_for_others_to_leave_is_read_meanwhile(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(1.5,), weight_store="scripted")
    await cluster.start()
    [home] = cluster.agents["host:0"].active()
    absent = ({"a", "b"} - {home}).pop()
    await cluster.serves(absent)
    expected = [("activate", home), ("evict", home), ("prefetch", absent), ("activate", absent)]
    assert sorted(cluster.orders()) == sorted(expected)
    assert cluster.orders()[-1] == ("activate", absent)


async def test_a_hint_that_fails_stops_no_activation(cluster: Cluster) -> None:
    cluster.configure(spec("a"), spec("b"), rooms=(1.5,), weight_store="scripted")
    await cluster.start()
    agent = cluster.agents["host:0"]
    [home] = agent.active()
    absent = ({"a", "b"} - {home}).pop()
    agent.unreadable.add(absent)
    await cluster.serves(absent)
    assert ("prefetch", absent) in cluster.orders()


async def test_a_model_over_two_devices_gets_both_and_gives_both_back(cluster: Cluster) -> None:
    """Needs a whole device for each part, so that other models must be evicted first."""
    wide = spec("wide", tp=2, num_kv_heads=4, weight_bytes=81920, token_bytes=512)
    cluster.configure(spec("x"), spec("y"), wide, rooms=(1.5, 1.5), engines=1)
    await cluster.start(delay_s=0.3)
    first, second = cluster.agents["host:0"], cluster.agents["host:1"]

    def of_wide() -> tuple[ScriptedAgent, ScriptedAgent]:
        """Returns the agents of rank 0's device and of the other; each part fills its device."""
        home, peer = (first, second) if "wide" in first.residents else (second, first)
        assert set(home.residents) == {"wide"}
        assert not peer.residents
        assert home.residents["wide"].peers == (peer.device,)
        return home, peer

    home, peer = of_wide()
    assert (await cluster.queue.placement()) == {"wide": (home.device,)}
    refused = await cluster.command("activate", model="wide", device=peer.device)
    assert not refused.ok
    assert "omit the device" in refused.message
    await cluster.serves("x")
    await cluster.serves("y")
    assert sorted(map(sorted, cluster.active().values())) == [["x"], ["y"]]
    await cluster.send("wide")
    await eventually(lambda: any("wide" in agent.residents for agent in (first, second)))
    of_wide()
    await eventually(lambda: cluster.finished("wide"))
    of_wide()
