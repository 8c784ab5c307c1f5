"""The prism policy (§6.2) and models in several parts: tensor parallelism."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from prism.policies.data import Activate, Migrate, ModelView
from prism.policies.prism import plan
from tests.policies.clusters import SETTINGS, actions_of, active, gpu, model, planned, summary, view


def wide(name: str, *devices: str, **more: Any) -> ModelView:
    if devices:
        more |= {"device": devices[0], "peers": devices[1:], "state": "active"}
    return model(name, tp=2, **more)


def test_a_wide_model_is_activated_on_two_devices() -> None:
    (action,) = plan(view([wide("a", weight=150, waiting=1)], [gpu("g0"), gpu("g1")]), SETTINGS)
    assert isinstance(action, Activate)
    assert (action.device, action.peers) == ("g0", ("g1",))


def test_its_eviction_frees_both() -> None:
    models = [wide("old", "g0", "g1", weight=150, idle_s=60), model("a", 80, waiting=1)]
    models += [model("b", 80, waiting=1)]
    assert planned(models, [gpu("g0"), gpu("g1")]) == [
        ("evict", "old", "g0"),
        ("activate", "a", "g0"),
        ("activate", "b", "g1"),
    ]


def test_idle_models_make_room_on_the_cheapest_node() -> None:
    models = [
        active("x", "g0", weight=80, idle_s=60),
        active("y", "g1", weight=80, idle_s=60),
        active("z", "g3", weight=80, idle_s=60),
        wide("a", weight=100, waiting=1),
    ]
    gpus = [gpu(f"g{i}", node=f"n{i // 2}") for i in range(4)]
    actions = plan(view(models, gpus), SETTINGS)
    assert [summary(a) for a in actions] == [("evict", "z", "g3"), ("activate", "a", "g2")]
    assert isinstance(actions[1], Activate)
    assert actions[1].peers == ("g3",)


def test_a_wide_model_moves_to_devices_that_hold_no_part_of_it() -> None:
    """Makes room on one node."""
    gpus = [gpu(f"g{i}", engines_free=0 if i < 2 else 1) for i in range(4)]
    models = [wide("a", "g0", "g1", weight=100, running=1), model("b", 80, waiting=1)]
    models[1] = structs.replace(models[1], pinned_device="g0")
    (moved,) = plan(view(models, gpus), SETTINGS)
    assert isinstance(moved, Migrate)
    assert (moved.source, moved.target, moved.peers) == ("g0", "g2", ("g3",))
    split = [structs.replace(g, node=f"n{i // 3}") for i, g in enumerate(gpus)]
    assert not actions_of(Migrate, plan(view(models, split), SETTINGS)), "its node has one free"


def test_a_resident_moves_for_a_wide_model_only_if_that_is_enough() -> None:
    """Prevents endless moves: nodes of two devices cannot hold four parts."""
    busy = [active("p", "g0", weight=60, running=1), active("q", "g1", weight=60, running=1)]
    gpus = [gpu(f"g{i}", node=f"n{i // 2}") for i in range(4)]
    one = [busy[0], wide("a", weight=100, waiting=1)]
    assert planned([*busy, *one[1:]], gpus[:2]) == [("refuse", "a")]
    assert planned(one, gpus[:2]) == [("refuse", "a")], "the target would hold the other part"
    assert planned(one, [*gpus[:2], gpus[2]]) == [("migrate", "p", "g0", "g2")]
    assert planned([*busy, *one[1:]], [*gpus[:2], gpus[2]]) == [("refuse", "a")], "one of two"
    four = [busy[0], model("a", weight=100, waiting=1, tp=4)]
    assert planned(four, gpus) == [("refuse", "a")]


def test_a_model_that_is_refused_stops_no_move_for_balance() -> None:
    hot = active("hot", "g0", token_rate=5.0, running=1, waiting=2)
    models = [hot, active("warm", "g0", token_rate=3.0), wide("a", weight=1000, waiting=1)]
    assert planned(models, [gpu("g0"), gpu("g1")]) == [
        ("refuse", "a"),
        ("migrate", "warm", "g0", "g1"),
    ]


def test_a_contended_wide_model_moves_for_balance() -> None:
    models = [
        wide("hot", "g0", "g1", token_rate=20.0, running=1, waiting=2),
        active("x", "g0", token_rate=9.0, pinned_device="g0"),
        active("y", "g1", token_rate=9.0, pinned_device="g1"),
    ]
    gpus = [gpu(f"g{i}") for i in range(4)]
    (moved,) = plan(view(models, gpus), SETTINGS)
    assert isinstance(moved, Migrate)
    assert (moved.model, moved.source, moved.target, moved.peers) == ("hot", "g0", "g2", ("g3",))
    assert plan(view(models, gpus[:3]), SETTINGS) == ()
    calm = [structs.replace(m, slo_tpot_s=m.slo_tpot_s / 100) for m in models]
    assert plan(view(calm, gpus), SETTINGS) == ()


def test_wide_models_stay_and_the_others_move_around_them() -> None:
    models = [
        wide("hot", "g0", "g1", token_rate=20.0, running=1, waiting=2),
        active("warm", "g0", token_rate=3.0),
        active("other", "g1", token_rate=2.9),
    ]
    gpus = [gpu("g0"), gpu("g1")]
    assert planned(models, gpus) == []
    assert planned(models, [*gpus, gpu("g2")]) == [("migrate", "warm", "g0", "g2")]
