"""The prism policy (§6.2): golden cases and properties of every plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.policies.data import Activate, Evict, Migrate, ModelView, Refuse
from prism.policies.planning.evacuation import must_leave
from prism.policies.prism import plan
from tests.policies.clusters import (
    SETTINGS,
    actions_of,
    active,
    check_capacity,
    clusters,
    gpu,
    model,
    planned,
    summary,
    view,
)

# --- start and arrival ---------------------------------------------------------------------


def test_initial_placement_spreads_wanted_models() -> None:
    models = [model(name, wanted=True) for name in "abc"]
    assert planned(models, [gpu("g0"), gpu("g1")]) == [
        ("activate", "a", "g0"),
        ("activate", "b", "g1"),
        ("activate", "c", "g0"),
    ]


def test_absent_models_stay_absent_without_a_request() -> None:
    assert planned([model("a")], [gpu("g0")]) == []


def test_never_evict_models_are_always_brought_back() -> None:
    assert planned([model("a", never_evict=True)], [gpu("g0")]) == [("activate", "a", "g0")]


def test_arrival_activates_on_the_least_pressed_device() -> None:
    models = [active("hot", "g0", token_rate=5.0, running=1), model("a", waiting=1)]
    assert planned(models, [gpu("g0", 1000), gpu("g1", 100)]) == [("activate", "a", "g1")]


def test_waiting_models_are_seated_before_wanted_ones() -> None:
    models = [model("big", 60, wanted=True), model("asked", 50, waiting=1)]
    actions = planned(models, [gpu("g0")])
    assert actions == [("activate", "asked", "g0"), ("refuse", "big")]


def test_models_under_way_are_left_alone() -> None:
    models = [model("a", waiting=3, device="g0", state="activating")]
    assert planned(models, [gpu("g0")]) == []


# --- eviction ------------------------------------------------------------------------------


def test_nothing_is_evicted_while_memory_suffices() -> None:
    models = [active("old", "g0", idle_s=1e6), model("a", waiting=1)]
    assert planned(models, [gpu("g0")]) == [("activate", "a", "g0")]


def test_larger_slo_goes_first() -> None:
    models = [
        active("strict", "g0", weight=40, idle_s=1000, slo_ttft_s=0.5),
        active("lax", "g0", weight=40, idle_s=100, slo_ttft_s=9.0),
        model("a", weight=40, waiting=1),
    ]
    assert planned(models, [gpu("g0")]) == [("evict", "lax", "g0"), ("activate", "a", "g0")]


def test_no_more_is_evicted_than_needed() -> None:
    models = [
        active("small", "g0", weight=5, idle_s=100, slo_ttft_s=9.0),
        active("large", "g0", weight=80, idle_s=100, slo_ttft_s=1.0),
        model("a", weight=60, waiting=1),
    ]
    assert planned(models, [gpu("g0")]) == [("evict", "large", "g0"), ("activate", "a", "g0")]


def test_the_device_that_costs_fewest_evictions() -> None:
    models = [
        active("a1", "g0", weight=45, idle_s=100),
        active("a2", "g0", weight=45, idle_s=100),
        active("b", "g1", weight=90, idle_s=100),
        model("x", weight=90, waiting=1),
    ]
    assert planned(models, [gpu("g0"), gpu("g1")])[0] == ("evict", "b", "g1")


def test_an_idle_model_gives_up_its_engine() -> None:
    models = [active("old", "g0", idle_s=60), model("a", waiting=1)]
    assert planned(models, [gpu("g0", 1000, engines_free=0)]) == [
        ("evict", "old", "g0"),
        ("activate", "a", "g0"),
    ]


def test_busy_and_protected_models_are_never_evicted() -> None:
    full = {"weight": 30, "idle_s": 1e6}
    models = [
        active("running", "g0", running=1, **full),
        active("waiting", "g0", waiting=1, **full),
        active("kept", "g0", never_evict=True, **full),
        model("a", 50, waiting=1),
    ]
    (refusal,) = plan(view(models, [gpu("g0")]), SETTINGS)
    assert isinstance(refusal, Refuse)
    assert refusal.reason.startswith("44 bytes")


def test_a_waiting_request_does_not_starve_behind_young_idle_models() -> None:
    models = [
        active("younger", "g0", weight=40, idle_s=3),
        active("older", "g0", weight=40, idle_s=8),
        model("a", 40, waiting=1),
    ]
    actions = plan(view(models, [gpu("g0")]), SETTINGS)
    assert [summary(a) for a in actions] == [("evict", "older", "g0"), ("activate", "a", "g0")]
    assert actions[0].reason == "requests starve: idle for 8.0 s, makes room for a"


def test_a_model_that_just_served_is_not_evicted_even_then() -> None:
    models = [active("fresh", "g0", weight=80, idle_s=0.5), model("a", 40, waiting=1)]
    assert planned(models, [gpu("g0")]) == [("refuse", "a")]


def test_a_wanted_model_evicts_nobody() -> None:
    models = [active("old", "g0", weight=80, idle_s=1e6), model("a", 40, wanted=True)]
    assert planned(models, [gpu("g0")]) == [("refuse", "a")]


def test_room_of_models_on_their_way_out_counts() -> None:
    models = [
        model("leaving", 80, device="g0", state="draining"),
        active("old", "g0", idle_s=1e6),
        model("a", 80, waiting=1),
    ]
    assert planned(models, [gpu("g0", engines_free=0)]) == [("activate", "a", "g0")]


@pytest.mark.parametrize("wanting", [{"waiting": 1}, {"waiting": 500}, {"token_rate": 0.1}])
def test_memory_pressure_evicts_what_was_idle_over_the_threshold(wanting: dict[str, float]) -> None:
    """Checks §6.2: "evicts a model if it remains idle longer than an empirical threshold", "only
    when GPU resources are constrained", "prioritizes evicting models with larger SLOs".

    Another model wants the memory: its requests wait, or 45 s of its tokens take what is free.
    """
    busy = active("busy", "g0", running=3, **wanting)
    strict = active("strict", "g0", idle_s=1000, slo_ttft_s=0.5)
    models = [busy, strict, active("lax", "g0", idle_s=46, slo_ttft_s=9.0)]
    short = [gpu("g0", free_bytes=4)]
    assert planned(models, short) == [("evict", "lax", "g0")]
    assert planned(models, [gpu("g0", free_bytes=5)]) == []
    assert planned(models, short, rebalance=False) == []
    assert planned([busy, active("young", "g0", idle_s=44)], short) == []


def test_an_idle_model_stays_on_a_full_device_if_no_other_wants_its_memory() -> None:
    """Does not count rates of requests before the idle time."""
    full = [gpu("g0", free_bytes=0), gpu("g1")]
    lone = active("lone", "g0", idle_s=1e6, token_rate=9.0)
    assert planned([lone], full) == []
    assert planned([lone, active("also idle", "g0", idle_s=1e6)], full) == []
    assert planned([lone, active("elsewhere", "g1", waiting=1)], full) == []
    slow = active("slow", "g0", running=1, token_rate=0.08)
    assert planned([lone, slow], [gpu("g0", free_bytes=4)]) == []


def test_a_deferred_model_is_activated_where_memory_is_to_spare() -> None:
    """Leaves a quarter of a busy device for its next burst."""
    deferred = model("a", weight=20, floor=0, deferred=True)
    assert planned([deferred], [gpu("g0", free_bytes=19)]) == []
    assert planned([deferred], [gpu("g0", free_bytes=20)]) == [("activate", "a", "g0")]
    assert planned([deferred], [gpu("g0")], rebalance=False) == []
    other = model("b", weight=20, floor=0, deferred=True)
    assert planned([deferred, other], [gpu("g0", capacity=39)]) == [("activate", "a", "g0")]
    asked = model("c", weight=20, floor=0, waiting=1)
    assert planned([deferred, asked], [gpu("g0", capacity=39)]) == [("activate", "c", "g0")]
    busy = active("busy", "g0", token_rate=1.0, idle_s=1.0)
    assert planned([deferred, busy], [gpu("g0", free_bytes=44)]) == []
    assert planned([deferred, busy], [gpu("g0", free_bytes=45)]) == [("activate", "a", "g0")]


def test_a_model_stays_for_as_long_as_it_took_to_load() -> None:
    """Prevents that alternating models spend more time loading than serving."""
    for owes_s, expected in ((0.1, [("refuse", "a")]), (0.0, [("evict", "b", "g0")])):
        models = [active("b", "g0", weight=80, idle_s=99, owes_s=owes_s), model("a", 40, waiting=1)]
        assert planned(models, [gpu("g0")])[:1] == expected


def test_a_transition_elsewhere_does_not_keep_a_short_device_waiting() -> None:
    models = [active("old", "g0", idle_s=60), active("busy", "g0", waiting=9)]
    gpus = [gpu("g0", free_bytes=4), gpu("g1"), gpu("g2")]
    away = [model("other", device="g1", state=s) for s in ("activating", "draining", "migrating")]
    for other in away:
        assert planned([*models, other], gpus) == [("evict", "old", "g0")]
        here = structs.replace(other, device="g0")
        assert planned([*models, here], gpus) == []
    coming = structs.replace(away[2], moving_to=("g0",))
    assert planned([*models, coming], gpus) == []


# --- repacking and migration ---------------------------------------------------------------


def fragmented(**more: Any) -> list[ModelView]:
    return [
        active("p", "g0", weight=49, floor=1, running=1),
        active("q", "g1", weight=49, floor=1, running=1),
        model("large", 79, 1, waiting=1, **more),
    ]


def test_a_resident_moves_when_that_makes_room() -> None:
    gpus = [gpu("g0"), gpu("g1")]
    assert planned(fragmented(), gpus) == [("migrate", "p", "g0", "g1")]


def test_one_move_at_a_time_and_no_eviction_meanwhile() -> None:
    models = fragmented()
    models[0] = structs.replace(models[0], state="migrating")
    models.append(active("young", "g0", weight=1, floor=0, idle_s=10))
    assert planned(models, [gpu("g0"), gpu("g1", fixed_bytes=50)]) == [("refuse", "large")]


def test_a_move_that_makes_no_room_for_it_keeps_no_model_waiting() -> None:
    """Has a migration on another device, and a recently idle model on this one."""
    models = [
        active("young", "g0", weight=60, idle_s=10),
        model("a", 50, waiting=1),
        model("moving", 10, device="g1", state="migrating", moving_to=("g2",)),
    ]
    gpus = [gpu("g0"), gpu("g1", 40), gpu("g2", 40)]
    assert planned(models, gpus) == [("evict", "young", "g0"), ("activate", "a", "g0")]


def test_migration_needs_a_gain_above_tau() -> None:
    gpus = [gpu("g0"), gpu("g1")]
    hot = active("hot", "g0", token_rate=5.0, running=1, waiting=2)
    assert planned([hot, active("warm", "g0", token_rate=3.0)], gpus) == [
        ("migrate", "warm", "g0", "g1")
    ]
    assert planned([hot, active("warm", "g0", token_rate=0.3)], gpus) == []


def test_nothing_moves_off_a_device_without_contention() -> None:
    """Has equally uneven pressures, but fewer than two contending requests."""
    gpus = [gpu("g0"), gpu("g1")]
    models = [active("hot", "g0", token_rate=5.0, waiting=2), active("warm", "g0", token_rate=3.0)]
    calm = [structs.replace(m, slo_tpot_s=0.6) for m in models]
    assert planned(models, gpus) == [("migrate", "warm", "g0", "g1")]
    assert planned(calm, gpus) == []
    seen = view(calm, gpus, rebalance=True)
    assert len(plan(seen, replace(SETTINGS, contended_requests=0.0))) == 1


def test_nothing_moves_off_a_device_that_is_not_pressed() -> None:
    """Has uneven rates of the past, but all requests are served."""
    gpus = [gpu("g0"), gpu("g1")]
    warm = active("warm", "g0", token_rate=3.0)
    hot = {n: active("hot", "g0", token_rate=5.0, running=9, waiting=n) for n in (0, 1, 2)}
    assert planned([hot[2], warm], gpus) == [("migrate", "warm", "g0", "g1")]
    assert planned([hot[1], structs.replace(warm, waiting=1)], gpus) == [
        ("migrate", "warm", "g0", "g1")
    ]
    assert planned([hot[1], warm], gpus) == []
    elsewhere = active("other", "g1", waiting=9)
    assert planned([hot[0], warm, elsewhere], gpus) == []
    for free_bytes, moves in ((24, 1), (25, 0)):
        tight = structs.replace(gpu("g0"), capacity_bytes=100, free_bytes=free_bytes)
        assert len(planned([hot[0], warm], [tight, gpu("g1")])) == moves
    seen = view([hot[0], warm], gpus, rebalance=True)
    assert len(plan(seen, replace(SETTINGS, contended_requests=0.0))) == 1


def test_a_move_for_balance_needs_room_that_is_free_now() -> None:
    """Weights would fit, but what requests on the target hold would have to go for them."""
    models = [active("hot", "g0", token_rate=5.0, waiting=2), active("warm", "g0", token_rate=3.0)]
    assert planned(models, [gpu("g0"), gpu("g1", free_bytes=11)]) == [
        ("migrate", "warm", "g0", "g1")
    ]
    assert planned(models, [gpu("g0"), gpu("g1", free_bytes=10)]) == []


@pytest.mark.parametrize("moves", [True, False])
def test_the_settings_say_what_becomes_of_running_requests(moves: bool) -> None:
    models = [
        active("hot", "g0", token_rate=5.0, waiting=2, running=1),
        active("warm", "g0", token_rate=3.0),
    ]
    seen = view(models, [gpu("g0"), gpu("g1")], rebalance=True)
    (action,) = plan(seen, replace(SETTINGS, move_running=moves))
    assert isinstance(action, Migrate)
    assert action.move_running is moves


def test_idle_models_do_not_migrate() -> None:
    models = [active("hot", "g0", token_rate=5.0, waiting=2), active("idle", "g0")]
    assert planned(models, [gpu("g0"), gpu("g1")]) == []


def test_no_migration_between_intervals() -> None:
    models = [active("hot", "g0", token_rate=5.0, waiting=2), active("warm", "g0", token_rate=3.0)]
    assert planned(models, [gpu("g0"), gpu("g1")], rebalance=False) == []


@pytest.mark.parametrize("state", ["activating", "draining", "migrating"])
def test_no_migration_from_or_to_a_device_where_models_come_or_go(state: str) -> None:
    """Balances the rest of the cluster meanwhile."""
    models = [active("hot", "g0", token_rate=5.0, waiting=2), active("warm", "g0", token_rate=3.0)]
    gpus = [gpu("g0"), gpu("g1"), gpu("g2", capacity=50)]
    for device, expected in (
        ("g0", []),
        ("g1", []),
        ("g2", [("migrate", "warm", "g0", "g1")]),
    ):
        other = model("other", device=device, state=state)
        assert planned([*models, other], gpus) == expected


def test_pinned_models_do_not_migrate() -> None:
    pin = {"pinned_device": "g0", "waiting": 2}
    models = [active("a", "g0", token_rate=5.0, **pin), active("b", "g0", token_rate=3.0, **pin)]
    assert planned(models, [gpu("g0"), gpu("g1")]) == []


# --- properties ----------------------------------------------------------------------------


@given(st.booleans().flatmap(lambda wide: clusters(wide=wide)))
@settings(max_examples=200, deadline=None)
def test_every_plan(view) -> None:
    actions = plan(view, SETTINGS)
    assert actions == plan(view, SETTINGS)
    check_capacity(view, actions)
    by_name = {m.name: m for m in view.models}
    alive = {g.name for g in view.gpus if g.alive}
    leaving = must_leave(view)
    assert len({a.model for a in actions}) == len(actions), "one action per model"
    assert all(
        a.target in alive and alive.issuperset(a.peers) for a in actions_of(Migrate, actions)
    )
    for evicted in actions_of(Evict, actions):
        victim = by_name[evicted.model]
        assert victim.state == "active"
        assert (victim.never_evict, victim.running, victim.waiting) == (False, 0, 0)
        assert victim in leaving or victim.idle_s > SETTINGS.min_idle_s
    for activated in actions_of(Activate, actions):
        seeker = by_name[activated.model]
        assert seeker.state == "absent"
        assert activated.device in alive
        assert activated.device not in seeker.barred
        assert seeker.pinned_device in (None, activated.device)
    assert all(a.reason for a in actions)
    seated = {a.model for a in actions_of(Activate, actions) + actions_of(Refuse, actions)}
    if not actions_of(Migrate, actions):
        asked = {m.name for m in view.models if m.state == "absent" and (m.waiting or m.wanted)}
        assert asked <= seated, "a model that is asked for gets an answer"


@given(clusters(wide=True))
@settings(max_examples=100, deadline=None)
def test_neither_names_of_models_nor_the_order_of_devices_matter(view) -> None:
    names = {m.name: f"{-i:03}" for i, m in enumerate(view.models)}
    renamed = tuple(structs.replace(m, name=names[m.name]) for m in view.models)
    changed = replace(view, models=renamed, gpus=view.gpus[::-1])
    without_reason = [replace(a, reason="") for a in plan(changed, SETTINGS)]
    expected = [replace(a, model=names[a.model], reason="") for a in plan(view, SETTINGS)]
    assert without_reason == expected
