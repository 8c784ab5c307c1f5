"""Times measured on a live cluster, instead of the simulator's own."""

from __future__ import annotations

import dataclasses

import pytest

from prism_sim.cluster.world import World
from prism_sim.core.records import Decision
from prism_sim.core.setup import ActivationSettings, ClusterSetup
from prism_sim.costs.model import GpuUsage
from tests.sim.clusters import LinearCost, cluster, model, parts, request, work


class OneCore(LinearCost):
    def usage(self, chunks: object, batch: int, context_tokens: int) -> GpuUsage:
        return GpuUsage(1.0, 1.0)


def kinds(world: World, kind: str) -> list[Decision]:
    return [d for d in world.records.decisions if d.kind == kind]


def test_a_request_reaches_its_queue_later() -> None:
    def first_s(request_s: float) -> float:
        setup = cluster([model(0, "a", request_s=request_s)])
        return World(setup, work(setup, [request(1.0, "a")])).run().first_s[0]

    assert first_s(0.25) - first_s(0.0) == pytest.approx(0.25)


def test_a_dispatch_takes_its_slot_before_its_engine_starts_it() -> None:
    """Has one slot: the second request pays for both transfers."""

    def firsts_s(submit_s: float) -> list[float]:
        setup = cluster([model(0, "a", submit_s=submit_s)])
        engine = dataclasses.replace(setup.engine, max_running=1)
        setup = dataclasses.replace(setup, engine=engine)
        records = World(setup, work(setup, [request(0.0, "a"), request(0.0, "a")])).run()
        return list(records.first_s)

    plain, slower = firsts_s(0.0), firsts_s(0.25)
    later_s = [b - a for a, b in zip(plain, slower, strict=True)]
    assert later_s == pytest.approx([0.25, 0.5])


def test_others_decode_while_a_dispatch_is_on_its_way() -> None:
    setup = cluster([model(0, "a", submit_s=0.05)])
    alone = World(setup, work(setup, [request(0.0, "a", output=50)])).run()
    beside = [request(0.0, "a", output=50), request(0.1, "a", output=1)]
    both = World(setup, work(setup, beside)).run()
    prefill_s = 0.01
    assert both.end_s[0] == pytest.approx(alone.end_s[0] + prefill_s, abs=0.011)


def in_turns(**activation: float) -> ClusterSetup:
    """Makes two models on a device with one engine."""
    setup = cluster(
        [model(0, "a", activation_s=0.4), model(1, "b", activation_s=0.4)],
        activation=ActivationSettings(**activation),
    )
    device = dataclasses.replace(setup.devices[0], engines=1)
    return dataclasses.replace(setup, devices=(device,))


@pytest.mark.parametrize("unload_s", [0.0, 0.3])
def test_a_model_comes_up_as_measured_once_the_evicted_one_is_gone(unload_s: float) -> None:
    setup = in_turns(unload_s=unload_s)
    world = World(setup, work(setup, [request(0.0, "a"), request(60.0, "b")]))
    world.run()
    (evict,), (gone,) = kinds(world, "evict"), kinds(world, "evicted")
    assert gone.time_s - evict.time_s == pytest.approx(unload_s)
    up = kinds(world, "active")[-1]
    assert up.model == "b"
    assert up.time_s - gone.time_s == pytest.approx(0.4)


def test_devices_of_one_processor_slow_each_other_down() -> None:
    def last_s(processor: str) -> float:
        models = [
            model(i, name, parts=parts(OneCore()), pinned_device=f"gpu:{i}")
            for i, name in enumerate("ab")
        ]
        setup = cluster(models, gpus=2)
        devices = tuple(dataclasses.replace(d, processor=processor) for d in setup.devices)
        setup = dataclasses.replace(setup, devices=devices)
        records = World(setup, work(setup, [request(0.0, "a"), request(0.0, "b")])).run()
        return max(records.end_s)

    assert last_s("host") == pytest.approx(2 * last_s(""))


def test_short_prefills_count_for_the_speed_as_live() -> None:
    setup = cluster([model(0, "a", speed_tokens_per_s=500.0)])
    world = World(setup, work(setup, [request(float(i), "a", prompt=10) for i in range(40)]))
    world.run()
    engine = world.models[0].residents[0].engine
    assert engine is not None
    assert engine.prompts.tokens_per_s == pytest.approx(10_000.0, rel=0.01)


def test_a_measured_speed_outlives_an_eviction() -> None:
    """Agents keep it as well: a model that comes back does not start from the initial estimate."""
    setup = in_turns()
    models = tuple(dataclasses.replace(m, speed_tokens_per_s=500.0) for m in setup.models)
    setup = dataclasses.replace(setup, models=models)
    asked = [request(0.0, "a", prompt=400), request(60.0, "b", prompt=400)]
    world = World(setup, work(setup, [*asked, request(120.0, "a", prompt=1)]))
    world.run()
    assert [d.model for d in kinds(world, "active")][-2:] == ["b", "a"]
    engine = world.models[0].residents[0].engine
    assert engine is not None
    assert engine.prompts.tokens_per_s == pytest.approx(10_000.0)


def test_a_model_to_make_room_is_looked_for_again_as_often_as_live() -> None:
    """Evicts "a" once it has been idle for a while, and not only at the next planning, 30 s
    later."""
    setup = dataclasses.replace(in_turns(), interval_s=30.0)
    world = World(setup, work(setup, [request(0.0, "b"), request(5.0, "a"), request(5.5, "b")]))
    world.run()
    ended_s = world.records.end_s[1]
    (later_s,) = (d.time_s - ended_s for d in kinds(world, "evict") if d.time_s > ended_s)
    idle_s = setup.settings.min_idle_s
    assert idle_s <= later_s <= idle_s + setup.retry_s
