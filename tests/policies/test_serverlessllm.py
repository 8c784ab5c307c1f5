"""ServerlessLLM: on demand, where start-up is fastest; one instance per GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.policies.baselines import serverlessllm
from prism.policies.bins import devices_of
from prism.policies.data import (
    Activate,
    ClusterView,
    Evict,
    GpuView,
    Migrate,
    ModelView,
    Refuse,
    Settings,
)
from tests.policies.clusters import actions_of, active, clusters, gpu, model, view

SETTINGS = Settings(min_idle_s=1.0)


def planned(models: list[ModelView], gpus: list[GpuView], **more: Any) -> list[tuple[str, ...]]:
    return [summary(a) for a in serverlessllm.plan(view(models, gpus, **more), SETTINGS)]


def summary(action: Any) -> tuple[str, ...]:
    match action:
        case Activate():
            return ("activate", action.model, action.device, *action.peers)
        case Migrate():
            return ("migrate", action.model, action.source, action.target)
        case Evict():
            return ("evict", action.model, action.device)
        case _:
            return ("refuse", action.model)


def test_loads_where_startup_is_fastest() -> None:
    asked = model("a", waiting=1, startup_s={"g0": 9.0, "g1": 0.4, "g2": 2.0})
    gpus = [gpu("g0"), gpu("g1"), gpu("g2")]
    assert planned([asked], gpus) == [("activate", "a", "g1")]


def test_nobody_is_loaded_without_a_request_but_wanted_ones_on_free_devices() -> None:
    assert planned([model("a")], [gpu("g0")]) == []
    wanted = [model("a", wanted=True), active("b", "g0", idle_s=1e9)]
    assert planned(wanted, [gpu("g0"), gpu("g1")]) == [("activate", "a", "g1")]
    assert planned(wanted, [gpu("g0")]) == [("refuse", "a")]


def test_an_instance_has_its_device_alone() -> None:
    models = [active("b", "g0", running=1), model("a", waiting=1)]
    assert planned(models, [gpu("g0", 1000)]) == [("refuse", "a")]


def test_an_idle_instance_is_reclaimed_after_its_keep_alive() -> None:
    idle = active("old", "g0", idle_s=3.0, startup_s={"g0": 2.0})
    asked = model("a", waiting=1)
    assert planned([idle, asked], [gpu("g0")]) == [("evict", "old", "g0"), ("activate", "a", "g0")]
    fresh = structs.replace(idle, idle_s=1.5)
    assert planned([fresh, asked], [gpu("g0")]) == [("refuse", "a")]
    kept = structs.replace(idle, never_evict=True)
    assert planned([kept, asked], [gpu("g0")]) == [("refuse", "a")]


def test_a_close_checkpoint_beats_a_free_device() -> None:
    """Evicts a model if another then starts sooner."""
    idle = active("old", "g0", idle_s=99.0)
    asked = model("a", waiting=1, startup_s={"g0": 1.0, "g1": 8.0})
    assert planned([idle, asked], [gpu("g0"), gpu("g1")])[0] == ("evict", "old", "g0")
    near = structs.replace(asked, startup_s={"g0": 1.0, "g1": 1.0})
    assert planned([idle, near], [gpu("g0"), gpu("g1")]) == [("activate", "a", "g1")]


def test_a_busy_instance_moves_away_where_that_is_sooner() -> None:
    busy = active("b", "g0", running=1, startup_s={"g1": 0.5})
    asked = model("a", waiting=1, startup_s={"g0": 1.0, "g1": 8.0})
    gpus = [gpu("g0"), gpu("g1")]
    assert planned([busy, asked], gpus) == [("migrate", "b", "g0", "g1")]
    far = structs.replace(busy, startup_s={"g1": 7.5})
    assert planned([far, asked], gpus) == [("activate", "a", "g1")]


def test_longest_queue_first() -> None:
    models = [model("a", waiting=1), model("b", waiting=3)]
    assert planned(models, [gpu("g0")]) == [("activate", "b", "g0"), ("refuse", "a")]


def test_a_backlog_gets_another_instance() -> None:
    busy = active("a", "g0", running=2, waiting=3, replicas_max=3)
    gpus = [gpu("g0"), gpu("g1")]
    (added,) = serverlessllm.plan(view([busy], gpus), SETTINGS)
    assert isinstance(added, Activate)
    assert (added.model, added.device, added.joins) == ("a", "g1", True)
    assert planned([structs.replace(busy, waiting=2)], gpus) == []
    assert planned([structs.replace(busy, replicas_max=1)], gpus) == []
    second = structs.replace(busy, device="g1", waiting=1)
    assert planned([busy, second], [*gpus, gpu("g2")]) == []
    more = [structs.replace(m, waiting=3) for m in (busy, second)]
    assert planned(more, [*gpus, gpu("g2")]) == [("activate", "a", "g2")]


def test_a_copy_is_not_added_while_another_one_leaves() -> None:
    far = {"g2": 9.0}
    busy = active("a", "g0", running=1, waiting=3, replicas_max=3, startup_s=far)
    idle = active("a", "g1", idle_s=99.0, replicas_max=3, startup_s=far)
    asked = model("b", waiting=1, startup_s={"g1": 1.0, "g2": 9.0})
    gpus = [gpu("g0"), gpu("g1"), gpu("g2")]
    assert planned([busy, idle, asked], gpus) == [("evict", "a", "g1"), ("activate", "b", "g1")]


def test_tensor_parallel_models_take_a_row_of_one_node() -> None:
    gpus = [gpu(f"g{i}", node=f"n{i // 2}") for i in range(4)]
    asked = model("a", 160, tp=2, waiting=1, startup_s={"g0": 5.0, "g3": 1.0})
    assert planned([asked], gpus) == [("activate", "a", "g2", "g3")]
    assert planned([asked], [gpu("g0", node="x"), gpu("g1", node="y")]) == [("refuse", "a")]


@given(st.booleans().flatmap(lambda wide: clusters(wide=wide)))
@settings(max_examples=200, deadline=None)
def test_every_plan(view: ClusterView) -> None:
    actions = serverlessllm.plan(view, SETTINGS)
    assert len({a.model for a in actions}) == len(actions)
    gone = {(a.model, a.device) for a in actions_of(Evict, actions)}
    by_name = {m.name: m for m in view.models}
    for activated in actions_of(Activate, actions):
        for device in (activated.device, *activated.peers):
            others = [m for m in view.models if device in devices_of(m)]
            assert all((m.name, m.device) in gone for m in others), "GPUs are not shared"
    for evicted in actions_of(Evict, actions):
        victim = by_name[evicted.model]
        assert (victim.running, victim.waiting, victim.never_evict) == (0, 0, False)
    homes = [d for a in actions_of(Activate, actions) for d in (a.device, *a.peers)]
    assert len(set(homes)) == len(homes)
    assert all(a.reason for a in actions_of(Refuse, actions))
    mirrored = replace(view, gpus=view.gpus[::-1])
    assert set(serverlessllm.plan(mirrored, SETTINGS)) == set(actions)
