"""A drained device gets nothing, and what is there leaves without a request given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from prism.policies import registry
from prism.policies.data import Activate, ClusterView, Evict, GpuView, Migrate, ModelView, Refuse
from prism.policies.placement import PlacementOutcome
from prism.policies.planning.evacuation import remaining
from prism.policies.profiles import problem
from prism.scheduler.cluster_scheduler import ClusterScheduler
from tests.policies.clusters import SETTINGS, active, gpu, model, planned, summary, view

POLICIES = registry.names()
FOLLOWING = ("static", "aegaeon")
"""Place no model again, or only for requests that have a turn."""
OUTCOME = PlacementOutcome({"a": 1}, {"a": 0}, {"a": 1.0})


def drained(name: str, **more: Any) -> GpuView:
    return gpu(name, **{"alive": False, "drained": True, **more})


def steps(policy: str, models: list[ModelView], gpus: list[GpuView]) -> list[tuple[str, ...]]:
    """Returns the actions of the loop that live and simulated clusters share."""
    done: list[Any] = []

    class Port:
        def view(self) -> ClusterView:
            seen, search = view(models, gpus), registry.get(policy).search
            trial = replace(problem(seen), simulate=lambda placement: OUTCOME)
            return replace(seen, target=search(trial)) if search else seen

        def apply(self, action: Any) -> None:
            done.append(action)

    ClusterScheduler(Port(), registry.get(policy), SETTINGS, 5.0).step(0.0)
    return [summary(action) for action in done]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_placed_there(policy: str) -> None:
    models = [model("a", waiting=1), model("b", wanted=True), model("c", never_evict=True)]
    gpus = [drained("g0"), gpu("g1", engines_free=1)]
    actions = steps(policy, models, gpus)
    assert {action[-1] for action in actions if action[0] == "activate"} <= {"g1"}
    assert any(action[0] == "activate" for action in actions) or policy in FOLLOWING


def test_models_move_one_by_one_to_each_device() -> None:
    """Puts models that have requests or must stay up first."""
    models = [
        active("idle", "g0", idle_s=20.0),
        active("kept", "g0", never_evict=True),
        active("busy", "g0", running=2, waiting=1),
    ]
    gpus = [drained("g0"), gpu("g1"), gpu("g2", 50)]
    assert planned(models, gpus) == [
        ("migrate", "kept", "g0", "g1"),
        ("migrate", "busy", "g0", "g2"),
    ]
    assert planned(models[:1], gpus) == [("migrate", "idle", "g0", "g1")]
    coming = model("new", device="g1", state="activating")
    assert planned([models[0], coming], gpus[:2]) == []


def test_without_room_idle_models_go_and_busy_ones_wait() -> None:
    full = [active("full", "g1", weight=90, running=1)]
    gpus = [drained("g0"), gpu("g1")]
    assert planned([active("idle", "g0"), *full], gpus) == [("evict", "idle", "g0")]
    assert planned([active("busy", "g0", running=1), *full], gpus) == []
    assert planned([active("kept", "g0", never_evict=True), *full], gpus) == []


def test_idle_models_elsewhere_make_room_for_busy_ones() -> None:
    """Evicts idle models first; the move follows."""
    young = active("young", "g1", weight=95, idle_s=5.0)
    gpus = [drained("g0"), gpu("g1", 100)]
    busy = active("busy", "g0", running=1)
    assert planned([busy, young], gpus) == [("evict", "young", "g1")]
    going = structs.replace(young, state="draining")
    assert planned([busy, going], gpus) == []
    assert planned([busy], gpus) == [("migrate", "busy", "g0", "g1")]


def test_a_copy_leaves_its_requests_to_the_others() -> None:
    copies = [active("a", d, running=3, replicas_max=2) for d in ("g0", "g1")]
    gpus = [drained("g0"), gpu("g1"), gpu("g2")]
    assert planned(copies, gpus) == [("evict", "a", "g0")]
    least = [structs.replace(copy, replicas_min=2, never_evict=True) for copy in copies]
    assert planned(least, gpus) == [("migrate", "a", "g0", "g2")]
    # A device is drained all the same where `replicas.min` cannot be kept without it.
    assert planned(least, gpus[:2]) == [("evict", "a", "g0")]
    young = active("young", "g2", weight=95, idle_s=5.0)
    full = [gpus[0], gpus[1], gpu("g2", 100)]
    assert planned([*least, young], full) == [("evict", "young", "g2")]
    # The last copies stay up.
    assert planned(least, [drained("g0"), drained("g1")]) == []


def test_a_model_over_several_devices_moves_as_a_whole() -> None:
    wide = active("w", "g0", running=1, tp=2, peers=("g1",), weight=40)
    nodes = [{"node": "n0"}, {"node": "n0"}, {"node": "n1"}, {"node": "n1"}]
    gpus = [
        drained(f"g{i}", **node) if i == 1 else gpu(f"g{i}", **node) for i, node in enumerate(nodes)
    ]
    assert planned([wide], gpus) == [("migrate", "w", "g0", "g2")]
    assert planned([wide], gpus[:3]) == []
    (move,) = registry.get("prism").plan(view([wide], gpus), SETTINGS)
    assert move.reason == "g1 is drained"
    # A pin is for models on one device: this one is nowhere else than where it belongs.
    pinned = structs.replace(wide, pinned_device="g1", running=0)
    assert planned([pinned], [structs.replace(g, alive=True, drained=False) for g in gpus]) == []


def test_a_model_that_is_pinned_elsewhere_moves_there() -> None:
    """Simulates a reload. A model pinned to a drained device is evicted when it is idle."""
    here = active("a", "g0", running=1, pinned_device="g1")
    assert planned([here], [gpu("g0"), gpu("g1")]) == [("migrate", "a", "g0", "g1")]
    own = structs.replace(here, pinned_device="g0")
    assert planned([own], [drained("g0"), gpu("g1")]) == []
    assert planned([structs.replace(own, running=0)], [drained("g0"), gpu("g1")]) == [
        ("evict", "a", "g0")
    ]


def test_other_policies_give_idle_models_up() -> None:
    models = [active("idle", "g0"), active("busy", "g0", running=1), active("b", "g1")]
    gpus = [drained("g0"), gpu("g1")]
    assert steps("serverlessllm", models, gpus) == [("evict", "idle", "g0")]
    assert steps("static", models, gpus) == []
    elsewhere = structs.replace(models[2], pinned_device="g0")
    assert steps("serverlessllm", [elsewhere], [gpu("g0"), gpu("g1")]) == []


@pytest.mark.parametrize(
    ("more", "moves", "why"),
    [
        ({"running": 1}, True, "has requests; it moves when another device has room"),
        ({"running": 1}, False, "has requests; it is evicted when it is idle"),
        (
            {"running": 1, "pinned_device": "g0"},
            True,
            "has requests; it is evicted when it is idle",
        ),
        ({}, True, "is about to be evicted"),
        ({"state": "migrating", "moving_to": ("g1",)}, True, "moves to g1"),
        (
            {"never_evict": True, "pinned_device": "g0"},
            True,
            "must stay up (never_evict or replicas.min), and cannot move;"
            " change its configuration, then run prism-serve reload",
        ),
    ],
)
def test_what_is_still_there_says_why(more: dict[str, Any], moves: bool, why: str) -> None:
    here = structs.replace(active("a", "g0"), **more)
    seen = view([here, active("b", "g1")], [drained("g0"), gpu("g1")])
    assert remaining(seen, "g0", moves) == {"a": why}


def test_a_refusal_names_the_drained_device() -> None:
    asked = view([model("a", waiting=1)], [drained("g0")])
    assert registry.get("prism").plan(asked, SETTINGS) == (Refuse("a", "operators drain g0"),)


def test_every_model_has_left_in_the_end() -> None:
    """Steps of the loop on a cluster that does at once what it is told."""
    models = {m.name: m for m in (active(f"m{i}", "g0", running=i % 2) for i in range(6))}
    gpus = [drained("g0"), gpu("g1", 45)]
    for _ in range(12):
        for action in registry.get("prism").plan(view(list(models.values()), gpus), SETTINGS):
            now = models[action.model]
            if isinstance(action, Migrate):
                models[action.model] = structs.replace(now, device=action.target)
            elif isinstance(action, Evict):
                models[action.model] = structs.replace(now, device=None, state="absent")
            assert not isinstance(action, Activate)
    assert not [m for m in models.values() if m.device == "g0"]
    assert all(m.device == "g1" for m in models.values() if m.running)
