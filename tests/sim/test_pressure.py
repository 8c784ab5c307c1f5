"""Eviction under memory pressure in whole simulations: it is bounded, and costs no more than it
gives (Prism §6.2)."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from prism.policies.data import Settings
from prism_replay.trace import TraceRequest
from prism_sim.cluster.world import World
from prism_sim.core.records import Records
from prism_sim.core.setup import ActivationSettings, ClusterSetup
from tests.sim.clusters import cluster, model, request, work

HOUR_S = 3600.0


def shared(count: int, activation_s: float, **settings: float) -> ClusterSetup:
    """Makes `count` models on a GPU of 64 MiB, 16 MiB each and their KV."""
    models = [model(n, f"m{n}", activation_s=activation_s) for n in range(count)]
    slow = ActivationSettings(layout_s=0.0)
    chosen = dataclasses.replace(Settings(), **settings)  # type: ignore[arg-type]
    return cluster(models, activation=slow, settings=chosen)


def run(setup: ClusterSetup, gap_s: float, until_s: float) -> Records:
    """Sends requests to each model in turn, `gap_s` apart."""
    names = [m.name for m in setup.models]
    trace = [request(n * gap_s, names[n % len(names)]) for n in range(int(until_s / gap_s))]
    return World(setup, work(setup, trace)).run()


def busy_first(setup: ClusterSetup, until_s: float) -> list[TraceRequest]:
    """Returns requests of 120 tokens each 0.2 s to the first model."""
    return [request(n * 0.2, setup.models[0].name) for n in range(int(until_s / 0.2))]


def test_activations_per_hour_are_bounded_at_the_published_threshold() -> None:
    """Evicts two models for a busy one, only after 45 s of idle time each."""
    setup = shared(3, 0.7, short_fraction=0.5)
    turns = [request(n * 25.0, f"m{1 + n % 2}") for n in range(int(HOUR_S / 25.0))]
    records = World(setup, work(setup, [*turns, *busy_first(setup, HOUR_S)])).run()
    evicted = Counter(d.model for d in records.decisions if d.kind == "evict")
    assert evicted.keys() <= {"m1", "m2"}
    assert 40 < max(evicted.values()) <= HOUR_S / 45.0
    ups = [d for d in records.decisions if d.kind == "activate"]
    assert len(ups) <= 1 + 2 * (1 + HOUR_S / 45.0)
    assert not records.errors


@pytest.mark.parametrize("count", [1, 3])
def test_no_model_leaves_a_full_device_for_nobody(count: int) -> None:
    """Prevents that a model that fills its device is loaded again after each pause."""
    records = run(shared(count, 0.7, short_fraction=0.9), 50.0, HOUR_S)
    kinds = Counter(d.kind for d in records.decisions)
    assert kinds == {"activate": count, "active": count}


def test_a_model_without_room_at_the_start_is_activated_once_there_is_room() -> None:
    """Has four models on a GPU that holds three, two of which leave for the busy one."""
    setup = shared(4, 0.7, short_fraction=0.5)
    trace = [*busy_first(setup, 200.0), request(400.0, "m0")]
    records = World(setup, work(setup, trace)).run()
    found = [(d.kind, d.time_s) for d in records.decisions if d.model == "m3"]
    assert {kind for kind, _ in found[:-2]} == {"refuse"}
    assert [kind for kind, _ in found[-2:]] == ["activate", "active"]
    assert 200.0 < found[-2][1] < 300.0


def test_models_that_take_turns_are_there_for_as_long_as_they_come() -> None:
    """Runs four models on a GPU that holds three, each with a new request at once.

    None is evicted before it has been up for as long as its load took. Later one is given up, so
    that the others stay.
    """
    records = run(shared(4, 3.0), 1.0, 300.0)
    load_s = 3.0
    up_s: dict[str, float] = {}
    evictions = 0
    for decision in records.decisions:
        if decision.kind == "active":
            up_s[decision.model] = decision.time_s
        elif decision.kind == "evict":
            evictions += 1
            assert up_s[decision.model] == 0.0 or (
                decision.time_s - up_s[decision.model] >= load_s - 1e-9
            )
    assert evictions > 10
    assert {index % 4 for index in records.errors} == {2}
    assert max(d.time_s for d in records.decisions if d.kind == "evict") < 60.0
