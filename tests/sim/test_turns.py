"""Token-level switching in the simulator: conservation of requests and memory, times by hand, and a
whole run from a YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.core.setup import ActivationSettings, ClusterSetup, EngineSettings
from tests.sim.clusters import MIB, LinearCost, cluster, model, parts, request, work
from tests.sim.command import call
from tests.sim.test_conservation import (
    assert_ends_once_and_in_order,
    assert_equal,
    assert_memory_is_given_back,
    odd_cost,
    simulate,
    step_by_step,
    traces,
)

NAMES = ("a", "b", "c", "d")
ACTIVATION = ActivationSettings(layout_s=0.03, load_bytes_s=160 * MIB, node_load_bytes_s=160 * MIB)
"""16 MiB of weights in 0.1 s."""
CONFIG = """
gpus: {type: h100, count: 4}
models: [{name: m, shape: Llama-3.1-8B, count: 12}]
slo: {ttft: 10s, tpot: 100ms}
generate: {kind: steady, alpha: 0, seconds: 60, rate: 2}
policy: POLICY
"""


@st.composite
def setups(draw: st.DrawFn) -> ClusterSetup:
    """Models of which two, or only one, fit on a device; memory for few requests."""
    weights = st.sampled_from([8, 24, 40])
    gpus = draw(st.integers(2, 8))
    wide = st.sampled_from([1, 1, 2] if gpus >= 6 else [1])
    models = [
        model(
            i,
            name,
            tp=draw(wide),
            weight_bytes=draw(weights) * MIB,
            parts=parts(odd_cost(i, 1e-6), kv),
        )
        for i, name in enumerate(NAMES)
        for kv in [draw(st.sampled_from([1, 8]))]
    ]
    engine = EngineSettings(max_running=draw(st.sampled_from([2, 16])), prefill_chunk_tokens=64)
    return cluster(models, gpus, engine=engine, policy="aegaeon", activation=ACTIVATION)


@given(setups(), traces(longest=2600))
@settings(max_examples=40, deadline=None)
def test_no_request_is_lost_and_memory_is_kept_to(
    setup: ClusterSetup, trace: list[TraceRequest]
) -> None:
    """Relies on the ledger, which asserts at every change that no device is overfilled."""
    world, records = simulate(setup, trace)
    assert not records.errors
    assert records.output_tokens.tolist() == list(world.work.output_tokens)
    assert_ends_once_and_in_order(world, records)
    assert_memory_is_given_back(world)


@given(setups(), traces())
@settings(max_examples=20, deadline=None)
def test_runs_and_single_steps_agree(setup: ClusterSetup, trace: list[TraceRequest]) -> None:
    assert_equal(simulate(setup, trace)[1], simulate(step_by_step(setup), trace)[1])


def by_hand(trace: Sequence[TraceRequest], gpus: int = 2) -> tuple[World, list[float]]:
    """Runs with times for a calculation by hand.

    Prefill takes 0.1 ms a token, a decode step 10 ms, a switch 0.13 s. KV of 100 tokens takes 0.6
    ms to or from the host. Of two devices one prefills, of four two.
    """
    cost = LinearCost(context_s=0.0)
    models = [model(i, name, parts=parts(cost)) for i, name in enumerate(NAMES)]
    setup = cluster(models, gpus, policy="aegaeon", activation=ACTIVATION)
    world = World(setup, work(setup, trace))
    records = world.run()
    return world, [*records.first_s, *records.end_s]


def test_a_lone_request_waits_for_its_weights_on_both_devices() -> None:
    """Gets its first token after switch 0.13 + prompt 0.01. Then its KV goes to the host and back,
    and 19 steps follow the other device's switch."""
    copy_s = 100 * 1024 / (160 * MIB)
    world, (first_s, end_s) = by_hand([request(0.0, "a")])
    assert first_s == pytest.approx(0.14)
    assert end_s == pytest.approx(0.14 + copy_s + 0.13 + copy_s + 19 * 0.01)
    assert [(d.kind, d.device) for d in world.records.decisions] == [
        ("activate", "gpu:0"),
        ("activate", "gpu:1"),
        ("active", "gpu:1"),
    ]


def test_a_request_joins_its_models_turn_after_a_step() -> None:
    """Needs no switch for the second prompt, whose KV arrives while the first request decodes."""
    copy_s = 100 * 1024 / (160 * MIB)
    _, (_, second_s, _, end_s) = by_hand([request(0.0, "a", 100, 200), request(1.003, "a")])
    assert second_s == pytest.approx(1.013)
    decoding_s = 0.14 + 2 * copy_s + 0.13
    came_s = 1.013 + 2 * copy_s
    steps = -(-(came_s - decoding_s) // 0.01)
    assert end_s == pytest.approx(decoding_s + (steps + 19) * 0.01)


def test_a_prompt_goes_where_what_runs_ends_first() -> None:
    """Has no requests waiting when b arrives, but a prompt runs until 1.13 s and a switch until
    0.63 s."""
    alone_s = 0.5 + 0.13 + 0.01
    _, (_, busy_s, *_) = by_hand([request(0.0, "a", 10_000), request(0.5, "b")], 4)
    assert busy_s == pytest.approx(alone_s)
    trace = [request(0.0, "a", 4000), request(0.5, "b", 100), request(0.501, "c")]
    _, (_, switching_s, last_s, *_) = by_hand(trace, 4)
    assert switching_s == pytest.approx(alone_s)
    # 0.03 s of a prompt on the one, a switch and a prompt of 0.14 s on the other
    assert last_s == pytest.approx(0.53 + 0.13 + 0.01)


@given(traces())
@settings(max_examples=40, deadline=None)
def test_the_load_of_a_device_is_the_time_until_all_is_done(trace: list[TraceRequest]) -> None:
    """Fetches nothing ahead: no two models fit on a device."""
    models = [model(i, name, weight_bytes=40 * MIB) for i, name in enumerate(NAMES)]
    setup = cluster(models, 2, policy="aegaeon", activation=ACTIVATION)
    world = World(setup, work(setup, trace))
    turns = world._turns
    assert turns is not None
    due_s: list[float] = []

    def look() -> None:
        (device,) = turns._prefills[1]
        due_s.append(world.kernel.time_s + device.view().load_s)

    looks_s = [max(world.work.arrival_s) + after_s for after_s in (0.01, 0.05, 0.2, 0.5)]
    for at_s in looks_s:
        world.kernel.at(at_s, look)
    ended_s = max(world.run().first_s)
    assert due_s == pytest.approx([max(at_s, ended_s) for at_s in looks_s])


def test_a_long_prompt_that_joins_late_takes_the_memory_of_what_was_fetched_ahead() -> None:
    """Needs more than 64 MiB: 16 MiB of a's weights, 16 MiB of b's and 40 MiB of KV."""
    trace = [request(0.0, "a", 1000), request(0.05, "b"), request(0.15, "a", 40_000)]
    world, (_, b_s, long_s, *_) = by_hand(trace)
    assert not world.records.errors
    assert long_s == pytest.approx(0.13 + 0.1 + 4.0)
    assert b_s == pytest.approx(long_s + 0.13 + 0.01)


def test_two_models_take_turns_of_the_papers_length() -> None:
    """Decodes each batch 10 times as fast as its SLO, with switches of 0.13 s.

    Turns are 0.26 / (10 x (0.5 - 0.2)) = 87 ms: 8 steps. The next model's weights are loaded during
    them, in 0.1 s. The first turn is the longest, since the other model arrives later.
    """
    world, _ = by_hand([request(0.0, "a", 100, 900), request(0.0, "b", 100, 900)])
    turns = [d for d in world.records.decisions if d.kind == "active"]
    assert [d.model for d in turns[:6]] == ["a", "b", "a", "b", "a", "b"]
    assert turns[0].reason == "a turn of 4.00 s"
    assert {d.reason for d in turns[1:6]} == {"a turn of 0.09 s"}
    gaps = [b.time_s - a.time_s for a, b in pairwise(turns[1:6])]
    # b's first weights came during the long turn; KV takes up to 3 ms
    expected = [0.08 + 0.03] + 3 * [0.08 + 0.02 + 0.03]
    assert gaps == pytest.approx(expected, abs=0.004)


def test_what_cannot_be_served_is_refused_by_name() -> None:
    large = request(0.0, "a", 60_000, 10)
    setup = cluster([model(0, "a")], 2, policy="aegaeon")
    records = World(setup, work(setup, [large])).run()
    assert records.errors == {0: "kv_memory_exceeded"}
    assert [(d.kind, d.model) for d in records.decisions] == [("refuse", "a")]


def test_clusters_that_it_does_not_know_are_named() -> None:
    trace = [request(0.0, "a")]
    one = cluster([model(0, "a")], 1, policy="aegaeon")
    with pytest.raises(ConfigError, match=r"gpus\.count: must be >= 2.*policy 'aegaeon'"):
        World(one, work(one, trace))
    wide = cluster([model(0, "a", tp=2), model(1, "b")], 5, policy="aegaeon")
    with pytest.raises(ConfigError, match=r"gpus\.count: must be >= 6.*policy 'aegaeon'"):
        World(wide, work(wide, trace))
    reuse = dataclasses.replace(
        cluster([model(0, "a")], 2, policy="aegaeon"), engine=EngineSettings(prefix_reuse=True)
    )
    with pytest.raises(ConfigError, match=r"engine\.prefix_reuse: .* policy 'aegaeon'"):
        World(reuse, work(reuse, trace))


def test_a_wide_model_takes_turns_on_as_many_gpus() -> None:
    """Loads half of 16 MiB, and copies half of the KV, over each of two links."""
    cost = LinearCost(context_s=0.0)
    models = [model(0, "wide", tp=2, parts=parts(cost)), model(1, "b", parts=parts(cost))]
    whole = dataclasses.replace(ACTIVATION, node_load_bytes_s=1000 * MIB)
    setup = cluster(models, 6, policy="aegaeon", activation=whole)
    world = World(setup, work(setup, [request(0.0, "wide"), request(0.0, "b")]))
    records = world.run()
    assert not records.errors
    copy_s, switch_s = 50 * 1024 / (160 * MIB), 0.03 + 0.05
    assert records.first_s[0] == pytest.approx(switch_s + 0.01)
    assert records.end_s[0] == pytest.approx(2 * (switch_s + copy_s) + 0.01 + 19 * 0.01)
    assert records.first_s[1] == pytest.approx(0.14)
    target = world.controller.target
    assert target is not None
    assert sorted(len(unit.devices) for unit in target.units) == [1, 1, 2, 2]
    used = {device.name for device in world.devices if device.ledger.peak_bytes > 8 * MIB}
    assert used == {device for unit in target.units for device in unit.devices}
    assert_memory_is_given_back(world)


def test_a_degree_without_two_groups_of_a_node_is_refused_by_name() -> None:
    models = [model(0, "wide", tp=2), model(1, "b")]
    setup = cluster(models, 6, policy="aegaeon")
    devices = [dataclasses.replace(d, node=f"n{i}") for i, d in enumerate(setup.devices)]
    setup = dataclasses.replace(setup, devices=tuple(devices))
    records = World(setup, work(setup, [request(0.0, "wide"), request(0.0, "b")])).run()
    assert list(records.errors.values()) == ["unserved"]
    (refusal,) = [d for d in records.decisions if d.kind == "refuse"]
    assert refusal.model == "wide"
    assert "no two groups of 2 devices of one node" in refusal.reason


def test_a_run_from_a_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs twelve models on four GPUs, each of which holds at most four at a time."""
    config = tmp_path / "pool.yaml"
    config.write_text(CONFIG.replace("POLICY", "aegaeon"))
    assert call(monkeypatch, "run", str(config), "--out", str(tmp_path / "out")) == 0
    rows = (tmp_path / "out" / "requests.csv").read_text().splitlines()
    assert len(rows) > 60
    assert not any(row.endswith("unserved") for row in rows)
