"""Conservation as in `test_conservation`, with copies that move and leave at any moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policies.data import Evict, Migrate
from prism.policies.placement import Hosted, Placement, Unit
from prism_replay.trace import TraceRequest
from prism_sim.cluster.device import Stage
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import UNBOUNDED_STEPS, ActivationSettings, ClusterSetup, EngineSettings
from tests.sim.clusters import MIB, cluster, model, parts, request, work
from tests.sim.test_conservation import (
    CONTROLLED,
    assert_ends_once_and_in_order,
    assert_equal,
    assert_memory_is_given_back,
    known,
    odd_cost,
    setups,
    traces,
)

Order = tuple[float, int, int, bool, bool]
"""(when, as a part of the trace; which model, where to, whether it leaves instead, whether its
requests go along)"""


@st.composite
def orders(draw: st.DrawFn) -> list[Order]:
    size = draw(st.integers(1, 12))
    return [
        (
            draw(st.floats(0.0, 1.0)),
            draw(st.integers(0, 3)),
            draw(st.integers(0, 2)),
            draw(st.sampled_from([False, False, False, True])),
            draw(st.sampled_from([True, True, False])),
        )
        for _ in range(size)
    ]


@st.composite
def movable(draw: st.DrawFn) -> ClusterSetup:
    """Draws a cluster of three devices with slow links, so that hand-overs take a while."""
    setup = draw(setups(("prism", "serverlessllm", "muxserve++", *CONTROLLED)))
    links = ActivationSettings(
        layout_s=draw(st.sampled_from([0.0, 0.0713])),
        load_bytes_s=300.7 * MIB,
        peer_bytes_s=draw(st.sampled_from([1.0, 1000.0])) * 1.017 * MIB,
        network_bytes_s=draw(st.sampled_from([0.3, 100.0])) * 1.013 * MIB,
        unload_s=draw(st.sampled_from([0.0, 0.0511])),
    )
    one = setup.devices[0]
    devices = [dataclasses.replace(one, name=f"gpu:{i}", node=f"node{i // 2}") for i in range(3)]
    return dataclasses.replace(setup, activation=links, devices=tuple(devices))


def moved(
    setup: ClusterSetup, trace: Sequence[TraceRequest], asked: Sequence[Order], run_steps: int
) -> tuple[World, Records]:
    engine = dataclasses.replace(setup.engine, run_steps=run_steps)
    changed = dataclasses.replace(setup, engine=engine)
    # searches take seconds; the first model has a second copy
    every = tuple(Hosted(m.name) for m in setup.models)
    copied = Placement((Unit(("gpu:0",), every), Unit(("gpu:1",), every[:1])))
    target = copied if setup.policy in CONTROLLED else None
    world = World(changed, work(changed, known(changed, trace)), target=target)
    for i, (when, *order) in enumerate(asked):
        # at odd times, so that no step ends at the very moment
        world.kernel.at(when * (world.work.end_s + 2.0) + 0.0001713 * i, apply, world, *order)
    return world, world.run()


def apply(world: World, model_: int, target: int, leaves: bool, along: bool) -> None:
    """Applies an order at random; does nothing if no copy could do that."""
    model = world.models[model_ % len(world.models)]
    active = [r for r in model.residents if r.stage is Stage.ACTIVE and r.replaced_by is None]
    if not active:
        return
    name, source = model.setup.name, active[target % len(active)]
    free = [d for d in world.devices if not any(r in d.guests for r in model.residents)]
    chosen = [*free[target % max(1, len(free)) :], *free][: source.tp]
    if leaves:
        world.controller.apply(Evict(name, source.home.name, "random", move_running=along))
    elif len(chosen) == source.tp == len({d.name for d in chosen}):
        first, *peers = (d.name for d in chosen)
        move = Migrate(name, source.home.name, first, "random", tuple(peers), along)
        world.controller.apply(move)


@given(movable(), traces(), orders())
@settings(max_examples=40, deadline=None)
def test_every_request_ends_once_and_memory_is_given_back(
    setup: ClusterSetup, trace: list[TraceRequest], asked: list[Order]
) -> None:
    world, records = moved(setup, trace, asked, UNBOUNDED_STEPS)
    assert_ends_once_and_in_order(world, records)
    if not records.errors:  # requests out of patience ended in place
        assert_memory_is_given_back(world)


@given(movable(), traces(), orders())
@settings(max_examples=25, deadline=None)
def test_runs_and_single_steps_agree(
    setup: ClusterSetup, trace: list[TraceRequest], asked: list[Order]
) -> None:
    runs, steps = (moved(setup, trace, asked, number)[1] for number in (UNBOUNDED_STEPS, 1))
    assert all(abs(a - b) < 1e-6 for a, b in zip(runs.end_s, steps.end_s, strict=True))
    assert runs.errors == steps.errors
    assert runs.counts == steps.counts


def two_gpus() -> ClusterSetup:
    """Makes two GPUs for three models, where a request takes much of the memory."""
    models = [
        model(
            index,
            name,
            weight_bytes=mib * MIB,
            token_bytes=8192,
            kv_floor_bytes=0,
            parts=parts(odd_cost(index, 0.0), 8),
        )
        for index, (name, mib) in enumerate({"a": 8, "b": 40, "c": 8}.items())
    ]
    engine = EngineSettings(max_running=16, prefill_chunk_tokens=64)
    return cluster(models, 2, engine=engine, policy="muxserve", warm=True)


SENT_ON = [
    request(0.0, "a", 100, 62),
    request(12.0, "a", 100, 100),
    request(0.0, "a", 100, 100),
    request(4.0, "c", 100, 400),
    request(28.0, "c", 100, 100),
    request(7.0, "b", 400, 300),
    request(0.0, "c", 400, 275),
    request(0.0, "a", 300, 252),
]


def test_a_run_ends_when_an_order_sends_requests_to_its_device() -> None:
    """Evicts the only copy of "b" while its request runs. The request waits for the next copy. That
    copy's device is asked at once, not after the current step or run of steps."""
    evicted = (0.425, 1, 0, True, True)
    runs, steps = (moved(two_gpus(), SENT_ON, [evicted], n)[1] for n in (UNBOUNDED_STEPS, 1))
    assert runs.counts["moved"] == 1
    assert_equal(runs, steps)


def test_these_orders_do_move_requests() -> None:
    """Shows that the two tests above are not vacuous."""
    seen = {"moved": 0, "migrated": 0, "evicted": 0}

    @given(movable(), traces(), orders())
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    def count(setup: ClusterSetup, trace: list[TraceRequest], asked: list[Order]) -> None:
        records = moved(setup, trace, asked, UNBOUNDED_STEPS)[1]
        for what in seen:
            seen[what] += records.counts.get(what, 0)

    count()
    assert min(seen.values()) >= 5, seen
