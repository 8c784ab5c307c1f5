"""Policies that bind requests to devices (QLM), and those that start models where it is fastest."""

from __future__ import annotations

import dataclasses

import pytest

from prism.policies.data import Activate, ClusterView, Settings
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings, ClusterSetup
from tests.sim.clusters import cluster, model, request, work

Arrival = tuple[float, str, int, int]


def run(setup: ClusterSetup, *requests: Arrival) -> tuple[World, Records]:
    world = World(setup, work(setup, [request(*one) for one in requests]))
    return world, world.run()


def decided(records: Records, kind: str) -> list[tuple[str, str]]:
    return [(d.model, d.device) for d in records.decisions if d.kind == kind]


def test_qlm_starts_with_the_models_that_ask_for_most_and_swaps_for_the_rest() -> None:
    """Serves on one GPU: "b" waits until "a" has no requests, then for the engine's restart."""
    setup = cluster([model(0, "a"), model(1, "b")], policy="qlm")
    _, records = run(setup, (1.0, "a", 100, 200), (1.5, "b", 100, 5), (1.6, "b", 100, 5))
    assert not records.errors
    assert decided(records, "active") == [("a", "gpu:0"), ("b", "gpu:0")]
    assert decided(records, "evict") == [("a", "gpu:0")]
    restart_s = setup.activation.restart_s
    assert records.started_s[0] == 1.0
    assert records.started_s[1] == pytest.approx(records.end_s[0] + restart_s, abs=0.1)
    assert records.started_s[2] == records.started_s[1]  # one group


def test_qlm_may_take_the_first_idle_gpu_whatever_it_holds() -> None:
    """Reproduces what Prism §7.5 criticises: "b" is up on the second GPU, but the first one is
    idle."""
    models = [model(0, "a"), model(1, "b")]
    requests = ((1.0, "a", 100, 50), (30.0, "b", 100, 5))
    _, blind = run(cluster(models, 2, policy="qlm-first-idle"), *requests)
    _, aware = run(cluster(models, 2, policy="qlm"), *requests)
    assert decided(blind, "active")[:2] == [("a", "gpu:0"), ("b", "gpu:1")]
    assert len(decided(blind, "active")) == 3
    assert decided(aware, "active") == [("a", "gpu:0"), ("b", "gpu:1")]
    assert aware.end_s[1] < blind.end_s[1] - 10


@pytest.mark.parametrize("policy", ["qlm", "qlm-first-idle"])
def test_every_bound_request_ends(policy: str) -> None:
    setup = cluster([model(i, name) for i, name in enumerate("abc")], 2, policy=policy)
    many = [(0.3 * i, "abc"[i * i % 3], 50 + i, 5 + i) for i in range(60)]
    world, records = run(setup, *many)
    assert (records.ended, records.errors) == (60, {})
    assert all(not m.unplaced for m in world.models)


def test_models_that_no_instance_holds_are_refused() -> None:
    setup = cluster([model(0, "a"), model(1, "wide", tp=2, parts={2: model(0, "a").parts[2]})], 1)
    _, records = run(
        dataclasses.replace(setup, policy="qlm"), (0.0, "a", 10, 5), (0.0, "wide", 10, 5)
    )
    assert list(records.errors.values()) == ["unserved"]
    assert [d.model for d in records.decisions if d.kind == "refuse"] == ["wide"]


def test_serverlessllm_gets_the_length_of_a_start() -> None:
    """Stores weights on one node per model: a start on another node waits for the network."""
    slow = ActivationSettings(weights_everywhere=False, network_bytes_s=1e6)
    setup = cluster([model(i, n) for i, n in enumerate("ab")], 4, policy="serverlessllm")
    setup = dataclasses.replace(setup, activation=slow, warm=False)
    seen: list[ClusterView] = []
    world = World(setup, work(setup, [request(5.0, "a"), request(5.0, "b")]))

    def plan(view: ClusterView, settings: Settings) -> tuple[Activate, ...]:
        seen.append(view)
        return original(view, settings)  # type: ignore[return-value]

    original = world.policy.plan
    world._planner._scheduler._policy = dataclasses.replace(world.policy, plan=plan)
    records = world.run()
    startup_s = {m.name: m.startup_s for m in seen[0].models}
    assert startup_s["a"]["gpu:0"] == startup_s["a"]["gpu:1"] < startup_s["a"]["gpu:2"]
    assert startup_s["b"]["gpu:2"] < startup_s["b"]["gpu:0"]
    assert decided(records, "active") == [("a", "gpu:0"), ("b", "gpu:2")]


def test_serverlessllm_gives_a_long_backlog_a_second_instance() -> None:
    setup = cluster([model(0, "a", replicas_max=2)], 2, policy="serverlessllm")
    many = [(1.0 + 0.01 * i, "a", 100, 100) for i in range(60)]
    _, records = run(setup, *many)
    assert decided(records, "active") == [("a", "gpu:0"), ("a", "gpu:1")]
    assert set(records.device) == {0, 1}
    assert not records.errors
