"""The control loop on the fake cluster: start, arrivals, long random runs."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from prism.policies import registry
from prism.policies.data import (
    Action,
    Activate,
    ClusterView,
    Evict,
    GpuView,
    Migrate,
    ModelView,
    Refuse,
    Settings,
)
from prism.scheduler.cluster_scheduler import ClusterScheduler
from prism.scheduler.fakes import FakeCluster
from tests.policies.clusters import active, gpu, model, view

SETTINGS = Settings(idle_threshold_s=45.0)


def gpus(*capacities: int, engines: int = 2) -> list[GpuView]:
    return [gpu(f"g{i}", capacity, engines) for i, capacity in enumerate(capacities)]


def scheduler(cluster: FakeCluster, policy: str = "prism", interval_s: float = 5.0):
    return ClusterScheduler(cluster, registry.get(policy), SETTINGS, interval_s)


def run(cluster: FakeCluster, loop: ClusterScheduler, until_s: float, step_s: float = 0.5) -> None:
    while cluster.now_s < until_s:
        cluster.advance(cluster.now_s + step_s)
        loop.step(cluster.now_s)


def test_start_brings_up_what_is_wanted() -> None:
    cluster = FakeCluster([model(n, 40, wanted=True) for n in "abc"], gpus(100, 100))
    loop = scheduler(cluster)
    assert {a.model for a in loop.step(0.0)} == {"a", "b", "c"}
    assert loop.step(0.5) == ()
    cluster.advance(1.0)
    assert {m.state for m in cluster.models.values()} == {"active"}


def test_arrival_evicts_an_idle_model_and_serves() -> None:
    cluster = FakeCluster([model("a", 60, wanted=True), model("b", 60)], gpus(100))
    loop = scheduler(cluster)
    run(cluster, loop, 60.0)
    cluster.request("b")
    run(cluster, loop, 62.0)
    assert cluster.serve() == ["b"]
    assert [type(a) for _, a in cluster.applied] == [Activate, Evict, Activate]


def test_moves_are_planned_once_an_interval() -> None:
    busy = {"state": "active", "device": "g0", "running": 1, "waiting": 4}
    models = [model(n, 10, token_rate=r, **busy) for n, r in (("a", 8.0), ("b", 6.0))]
    cluster = FakeCluster(models, gpus(100, 100, engines=4))
    loop = scheduler(cluster, interval_s=5.0)
    moved = [a for step in range(9) for a in loop.step(step * 0.5) if isinstance(a, Migrate)]
    assert [a.model for a in moved] == ["b"]
    cluster.advance(4.5)
    cluster.models["a"] = structs.replace(cluster.models["a"], device="g1")
    assert loop.step(4.5) == ()
    assert [type(a) for a in loop.step(5.0)] == [Migrate]


def test_a_step_whose_time_was_rounded_down_plans_moves_too() -> None:
    loop = scheduler(FakeCluster([], gpus(100)), interval_s=5.0)
    loop.step(0.678593564173913)
    assert loop.due(5.678593564173912)
    assert not loop.due(5.67)


def test_a_failed_activation_is_tried_elsewhere() -> None:
    cluster = FakeCluster([model("a")], gpus(100, 90))
    cluster.faults.add("a")
    loop = scheduler(cluster)
    cluster.request("a")
    run(cluster, loop, 3.0)
    devices = [a.device for _, a in cluster.applied if isinstance(a, Activate)]
    assert devices == ["g0", "g1"]
    assert cluster.serve() == ["a"]


def test_a_model_that_fits_nowhere_is_refused_with_a_reason() -> None:
    cluster = FakeCluster([model("a", 200)], gpus(100))
    cluster.request("a")
    scheduler(cluster).step(0.0)
    assert cluster.refusals["a"].startswith("101 bytes")


def random_cluster(dice: random.Random) -> FakeCluster:
    def made(i: int) -> ModelView:
        return model(
            f"m{i}", dice.randint(5, 45), 5, slo_ttft_s=dice.choice([0.5, 2.0]), wanted=True
        )

    models = [made(i) for i in range(dice.randint(3, 7))]
    models[0] = structs.replace(models[0], never_evict=True)
    return FakeCluster(models, gpus(100, 80, engines=dice.randint(1, 3)), action_s=dice.random())


@pytest.mark.parametrize("seed", range(30))
def test_long_random_runs_serve_everybody(seed: int) -> None:
    """Serves every request soon after the others' traffic pauses.

    The fake asserts capacity, engines, and that no busy or protected model is evicted.
    """
    dice = random.Random(seed)
    cluster = random_cluster(dice)
    loop = scheduler(cluster)
    while cluster.now_s < 300.0:
        for name in cluster.models:
            if dice.random() < 0.05:
                cluster.request(name)
                if dice.random() < 0.1:
                    cluster.faults.add(name)
        cluster.serve(rate=float(dice.choice([0, 1, 50])))
        run(cluster, loop, cluster.now_s + 1.0)
    for _ in range(60):
        cluster.serve()
        run(cluster, loop, cluster.now_s + 1.0)
    assert not [m.name for m in cluster.models.values() if m.waiting]
    assert any(isinstance(a, Activate | Evict | Refuse) for _, a in cluster.applied)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_actions(seed: int) -> None:
    def actions() -> list[object]:
        dice = random.Random(seed)
        cluster = random_cluster(dice)
        loop = scheduler(cluster)
        for _ in range(40):
            cluster.request(dice.choice(list(cluster.models)))
            cluster.serve(rate=dice.random())
            run(cluster, loop, cluster.now_s + 2.0)
        return list(cluster.applied)

    assert actions() == actions()


def test_the_static_policy_never_moves_anything() -> None:
    dice = random.Random(1)
    cluster = FakeCluster([model(f"m{i}", 10, 5, wanted=True) for i in range(4)], gpus(100, 100))
    loop = scheduler(cluster, "static")
    for _ in range(100):
        cluster.request(dice.choice(list(cluster.models)))
        cluster.serve(rate=dice.random())
        run(cluster, loop, cluster.now_s + 1.0)
    assert [type(a) for _, a in cluster.applied] == [Activate] * 4


def test_what_a_copy_can_serve_is_noted_while_all_serve() -> None:
    """Excludes a copy that is activating, whose share of the rate makes the others' too low."""
    load = {"token_rate": 60.0, "waiting": 9, "oldest_wait_s": 9.0, "replicas_max": 4}
    one = active("a", "host:0", **load)
    half = structs.replace(one, token_rate=30.0)
    coming = model("a", device="host:1", state="activating", token_rate=30.0, replicas_max=4)
    views: list[ClusterView] = []
    shown = [one]

    class Shown(FakeCluster):
        def view(self) -> ClusterView:
            return view(shown, gpus(100, 100))

        def apply(self, action: Action) -> None:
            pass

    loop = scheduler(Shown([], []))
    loop.observe = lambda seen, _: views.append(seen)
    loop.step(0.0)
    shown = [half, coming]
    loop.step(0.0)
    assert [m.saturated_rate for seen in views for m in seen.models] == [60.0, 60.0, 60.0]
