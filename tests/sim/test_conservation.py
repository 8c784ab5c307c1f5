"""Conservation over random clusters, traces and policies.

Every request ends exactly once, memory is never overfilled, time never runs backwards, and the same
input gives the same bytes. The simulator itself checks memory and double ends at each change
(`Ledger`, `Records`); these tests drive it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prism.policies import registry
from prism.policies.data import Settings
from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import UNBOUNDED_STEPS, ClusterSetup, EngineSettings
from tests.sim.clusters import MIB, LinearCost, cluster, model, parts, request, work

POLICIES = (
    "prism",
    "prism-fcfs",
    "prism-free-memory",
    "static",
    "serverlessllm",
    "dedicated",
    "muxserve++",
    "qlm",
    "qlm-first-idle",
)
CONTROLLED = ("muxserve", "alpaserve", "seallm")
NAMES = ("a", "b", "c", "d")


@st.composite
def setups(draw: st.DrawFn, policies: Sequence[str] = (*POLICIES, *CONTROLLED)) -> ClusterSetup:
    """Draws a cluster with odd step times.

    No step then ends exactly at an arrival or at the end of another model's step. The order at such
    a moment depends on how steps are taken.
    """
    gpus = draw(st.integers(1, 3))
    kv = draw(st.sampled_from([1, 8]))
    models = [
        model(
            index,
            name,
            tp=draw(st.sampled_from([1, 1, 2] if gpus > 1 else [1])),
            weight_bytes=draw(st.sampled_from([8, 16, 40])) * MIB,
            token_bytes=1024 * kv,
            kv_floor_bytes=draw(st.sampled_from([0, MIB])) * kv,
            parts=parts(odd_cost(index, draw(st.sampled_from([0, 1e-6]))), kv),
            never_evict=draw(st.booleans()) and index == 0,
        )
        for index, name in enumerate(NAMES[: draw(st.integers(1, 4))])
    ]
    engine = EngineSettings(
        max_running=draw(st.sampled_from([2, 16])),
        prefill_chunk_tokens=draw(st.sampled_from([64, 512])),
        mixed_chunk=draw(st.booleans()),
    )
    return cluster(
        models,
        gpus,
        engine=engine,
        policy=draw(st.sampled_from(policies)),
        warm=draw(st.booleans()),
        settings=Settings(
            idle_threshold_s=draw(st.sampled_from([2.0, 45.0])), move_running=draw(st.booleans())
        ),
        search_requests=10,
    )


def odd_cost(index: int, context_s: float) -> LinearCost:
    return LinearCost(1.0137e-4 + 1.39e-6 * index, 0.0100193 + 1.3743e-4 * index, context_s)


@st.composite
def traces(draw: st.DrawFn, longest: int = 600) -> list[TraceRequest]:
    size = draw(st.integers(1, 40))
    seconds = draw(st.sampled_from([1.0, 30.0, 200.0]))
    fractions = st.floats(0.0, 1.0)
    return [
        request(
            draw(fractions) * seconds,
            draw(st.sampled_from(NAMES)),
            draw(st.integers(1, longest)),
            draw(st.integers(1, 400)),
        )
        for _ in range(size)
    ]


@st.composite
def feasible(draw: st.DrawFn) -> ClusterSetup:
    """Draws GPUs that hold all models at once, with any request's KV. Policies that give a model or
    a request a separate device are left out."""
    shared = [p for p in (*POLICIES, *CONTROLLED) if p not in ("dedicated", "serverlessllm")]
    setup = draw(setups(shared))
    models = tuple(dataclasses.replace(m, weight_bytes=8 * MIB) for m in setup.models)
    devices = tuple(dataclasses.replace(d, capacity_bytes=256 * MIB) for d in setup.devices)
    return dataclasses.replace(setup, models=models, devices=devices, patience_s=3600.0)


def known(setup: ClusterSetup, trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    names = {m.name for m in setup.models}
    return [r for r in trace if r.model in names] or [request(0.0, "a")]


def simulate(setup: ClusterSetup, trace: Sequence[TraceRequest]) -> tuple[World, Records]:
    world = World(setup, work(setup, known(setup, trace)))
    return world, world.run()


@given(setups(), traces())
@settings(max_examples=40, deadline=None)
def test_every_request_ends_once_and_in_order(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    assert_ends_once_and_in_order(*simulate(setup, trace))


def assert_ends_once_and_in_order(world: World, records: Records) -> None:
    assert records.ended == len(world.work)
    for i in range(len(world.work)):
        assert records.end_s[i] >= world.work.arrival_s[i]
        if i in records.errors:
            continue
        moments = [world.work.arrival_s[i], records.started_s[i], records.first_s[i]]
        moments.append(records.end_s[i])
        assert moments == sorted(moments)
        assert records.output_tokens[i] == world.work.output_tokens[i]


@given(feasible(), traces())
@settings(max_examples=40, deadline=None)
def test_where_all_can_be_served_all_are_and_memory_is_given_back(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    world, records = simulate(setup, trace)
    assert not records.errors
    assert records.output_tokens.tolist() == list(world.work.output_tokens)
    assert_memory_is_given_back(world)


def assert_memory_is_given_back(world: World) -> None:
    for device in world.devices:
        assert device.ledger.peak_bytes <= device.ledger.capacity_bytes
        assert device.ledger.claimed_bytes == 0
        assert all(account.kv_bytes == 0 for account in device.ledger.accounts.values())
        assert device.gpu.jobs == []


def overloaded() -> ClusterSetup:
    """Makes one GPU for four models, two requests at a time: not all are served in time."""
    models = [
        model(i, name, weight_bytes=8 * MIB, kv_floor_bytes=0) for i, name in enumerate("abc")
    ]
    models.append(model(3, "d", kv_floor_bytes=0))
    engine = EngineSettings(max_running=2, prefill_chunk_tokens=64)
    return cluster(models, engine=engine, policy="qlm", warm=False)


IN_VAIN = [
    request(0.0, "a", 186, 250),
    request(0.0, "a", 216, 161),
    request(0.0, "a", 268, 297),
    request(0.462, "a", 518, 140),
    request(0.888, "a", 133, 106),
    request(0.283, "a", 32, 271),
    request(0.528, "b", 88, 188),
    request(0.0, "d", 9, 220),
    request(0.306, "b", 321, 151),
    request(0.663, "a", 582, 26),
    request(0.844, "b", 211, 337),
    request(0.3, "a", 154, 223),
    request(0.0, "d", 486, 32),
]


def test_requests_in_vain_end_with_their_timeout() -> None:
    """Requests end at the end of the patience, not at the last event before it."""
    for setup in (overloaded(), step_by_step(overloaded())):
        world, records = simulate(setup, IN_VAIN)
        horizon_s = world.work.end_s + setup.patience_s
        assert records.errors
        assert {records.end_s[i] for i in records.errors} == {horizon_s}
        assert records.end_time_s == horizon_s


def like_alone() -> ClusterSetup:
    """Makes four models on two GPUs. A model with a GPU to itself takes just its execution time:
    the placement search finds several equally good placements."""
    weights = {"a": 16, "b": 40, "c": 8, "d": 8}
    models = [
        model(i, name, weight_bytes=mib * MIB, kv_floor_bytes=0, parts=parts(odd_cost(i, 0.0)))
        for i, (name, mib) in enumerate(weights.items())
    ]
    return cluster(models, 2, policy="alpaserve", warm=False)


ALONE = [request(0.0, "c", 1, 1), request(0.8722, "b", 1, 169), request(0.8923, "d", 1, 27)]


@given(setups(), traces())
@example(overloaded(), IN_VAIN)
@example(like_alone(), ALONE)
@settings(max_examples=40, deadline=None)
def test_runs_and_single_steps_agree(setup: ClusterSetup, trace: list[TraceRequest]) -> None:
    assert setup.engine.run_steps == UNBOUNDED_STEPS
    assert_equal(simulate(setup, trace)[1], simulate(step_by_step(setup), trace)[1])


def step_by_step(setup: ClusterSetup) -> ClusterSetup:
    return dataclasses.replace(setup, engine=dataclasses.replace(setup.engine, run_steps=1))


def assert_equal(runs: Records, steps: Records) -> None:
    assert runs.end_s.tolist() == pytest.approx(steps.end_s.tolist(), rel=1e-9)
    assert runs.first_s.tolist() == pytest.approx(steps.first_s.tolist(), rel=1e-9)
    assert runs.counts == steps.counts
    assert runs.errors == steps.errors


@given(setups(), traces())
@settings(max_examples=20, deadline=None)
def test_the_same_input_gives_the_same_bytes(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    (_, first), (_, second) = simulate(setup, trace), simulate(setup, trace)
    assert first.end_s.tobytes() == second.end_s.tobytes()
    assert first.decisions == second.decisions
    assert first.events == second.events


@given(setups(), traces())
@settings(max_examples=40, deadline=None)
def test_who_finds_nobody_waiting_starts_as_from_the_queue(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    """Compares with a world that records its queues, in which all requests pass through them."""
    _, records = simulate(setup, trace)
    queued = World(setup, work(setup, known(setup, trace)), keep_queues=True).run()
    assert records.started_s.tobytes() == queued.started_s.tobytes()
    assert records.end_s.tobytes() == queued.end_s.tobytes()
    assert records.decisions == queued.decisions
    assert records.counts == queued.counts


def test_these_are_policies() -> None:
    assert {*POLICIES, *CONTROLLED} <= set(registry.names())
