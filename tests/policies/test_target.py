"""Following an offline placement: activation, moves, replicas, cycles, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.policies.bins import devices_of
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
from prism.policies.placement import Hosted, Placement, Unit
from prism.policies.planning import target
from tests.policies.clusters import active, gpu, model, view

SETTINGS = Settings()


def unit(devices: str, *names: str) -> Unit:
    return Unit(tuple(devices.split()), tuple(Hosted(name) for name in names))


def planned(
    models: Sequence[ModelView], gpus: Sequence[GpuView], units: Sequence[Unit], **refused: str
) -> tuple[Action, ...]:
    return target.plan(view(models, gpus, target=Placement(tuple(units), refused)), SETTINGS)


def summary(actions: Sequence[Action]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for action in actions:
        match action:
            case Activate():
                found.append(("activate", action.model, action.device, *action.peers))
            case Migrate():
                found.append(("migrate", action.model, action.source, action.target))
            case Evict():
                found.append(("evict", action.model, action.device))
            case Refuse():
                found.append(("refuse", action.model))
    return found


def test_activates_what_the_target_has() -> None:
    models = [model("a"), model("b", tp=2, weight=60)]
    actions = planned(models, [gpu("g0"), gpu("g1")], [unit("g0", "a"), unit("g0 g1", "b")])
    assert summary(actions) == [("activate", "a", "g0"), ("activate", "b", "g0", "g1")]


def test_a_kv_limit_is_passed_on() -> None:
    units = [Unit(("g0",), (Hosted("a", kv_limit_bytes=7),))]
    (action,) = planned([model("a")], [gpu("g0")], units)
    assert isinstance(action, Activate)
    assert action.kv_limit_bytes == 7


def test_a_further_copy_joins_the_ones_that_serve() -> None:
    """Leaves requests where a copy serves until another one does, too."""
    units = [unit("g0", "a", "b"), unit("g1", "a", "b")]
    coming = model("b", device="g0", state="activating")
    actions = planned([active("a", "g0"), coming], [gpu("g0"), gpu("g1")], units)
    joins = {action.model: action.joins for action in actions if isinstance(action, Activate)}
    assert joins == {"a": True, "b": False}


def test_what_stands_as_planned_is_left_alone() -> None:
    models = [active("a", "g0"), active("b", "g0", tp=2, peers=("g1",))]
    units = [unit("g0", "a"), unit("g0 g1", "b")]
    assert planned(models, [gpu("g0"), gpu("g1")], units) == ()


def test_a_new_target_moves_before_it_breaks() -> None:
    actions = planned([active("a", "g0")], [gpu("g0"), gpu("g1")], [unit("g1", "a")])
    assert summary(actions) == [("migrate", "a", "g0", "g1")]


def test_two_full_devices_swap_by_evicting_the_idler() -> None:
    models = [active("a", "g0", weight=60, running=2), active("b", "g1", weight=60)]
    units = [unit("g0", "b"), unit("g1", "a")]
    gpus = [gpu("g0"), gpu("g1")]
    assert summary(planned(models, gpus, units)) == [("evict", "b", "g1")]
    leaving = [models[0], structs.replace(models[1], state="draining")]
    assert planned(leaving, gpus, units) == ()
    gone = [models[0], model("b", weight=60)]
    assert summary(planned(gone, gpus, units)) == [("migrate", "a", "g0", "g1")]


def test_no_second_copy_moves_to_where_one_is_on_its_way() -> None:
    """Does not move two copies to one device.

    The first one's requests would be left in a queue that the second takes over.
    """
    leaving = structs.replace(active("a", "g0"), state="migrating", moving_to=("g2",))
    models = [leaving, active("a", "g1")]
    gpus = [gpu("g0"), gpu("g1"), gpu("g2"), gpu("g3")]
    units = [unit("g2", "a"), unit("g3", "a")]
    assert summary(planned(models, gpus, units)) == [("migrate", "a", "g1", "g3")]
    arrived = [active("a", "g2"), structs.replace(leaving, state="draining", moving_to=())]
    assert summary(planned(arrived, gpus, units[:1])) == []


def test_no_copy_comes_where_one_is_still_leaving() -> None:
    """Has an operator's migration from g1, a device in the target, where it serves meanwhile."""
    leaving = structs.replace(active("a", "g1"), state="migrating", moving_to=("g2",))
    gpus, units = [gpu("g0"), gpu("g1"), gpu("g2")], [unit("g0", "a"), unit("g1", "a")]
    assert planned([leaving], gpus, units) == ()
    found = planned([active("a", "g2")], gpus, units)
    assert summary(found) == [("migrate", "a", "g2", "g0"), ("activate", "a", "g1")]


def test_copies_that_leave_are_not_counted_again() -> None:
    """Has three copies with two draining; the third moves."""
    leaving = [structs.replace(active("a", d), state="draining") for d in ("g0", "g1")]
    gpus = [gpu("g0"), gpu("g1"), gpu("g2"), gpu("g3")]
    found = planned([*leaving, active("a", "g2")], gpus, [unit("g3", "a")])
    assert summary(found) == [("migrate", "a", "g2", "g3")]


def test_moves_that_wait_for_each_other_do_not_begin() -> None:
    """Has two full devices whose models can only swap.

    A migration would hold both until it fails.
    """
    models = [active("a", "g0", weight=60), active("b", "g1", weight=30)]
    full = gpu("g1", free_bytes=0)
    units = [unit("g1", "a"), unit("g0", "b")]
    assert summary(planned(models, [gpu("g0", free_bytes=20), full], units)) == [
        ("evict", "a", "g0")
    ]
    roomy = [gpu("g0", free_bytes=39), gpu("g1", free_bytes=69)]
    assert summary(planned(models, roomy, units)) == [
        ("migrate", "a", "g0", "g1"),
        ("migrate", "b", "g1", "g0"),
    ]


def test_a_move_may_wait_for_the_requests_of_who_stays() -> None:
    """Migrates although the target is full of requests: they end, and the copy serves meanwhile."""
    models = [active("a", "g0", weight=30), active("b", "g1", weight=30)]
    full = gpu("g1", free_bytes=0)
    found = planned(models, [gpu("g0"), full], [unit("g1", "a", "b")])
    assert summary(found) == [("migrate", "a", "g0", "g1")]


def test_the_last_copy_that_serves_stays_until_another_one_does() -> None:
    """Keeps the only copy that serves, since its requests could not resume."""
    gpus, units = [gpu("g0"), gpu("g1"), gpu("g2")], [unit("g2", "a")]
    coming = structs.replace(active("a", "g2"), state="activating")
    assert planned([active("a", "g0"), coming], gpus, units) == ()
    two = [active("a", "g0"), active("a", "g1"), coming]
    (first,) = planned(two, gpus, units)
    assert isinstance(first, Evict)
    assert first.move_running
    assert len(planned([active("a", "g0"), active("a", "g2")], gpus, units)) == 1


def test_a_model_that_is_left_out_finishes_what_runs() -> None:
    (evict,) = planned([active("a", "g0", running=1)], [gpu("g0")], [])
    assert isinstance(evict, Evict)
    assert not evict.move_running


def test_who_has_a_copy_on_its_way_is_not_the_one_to_go() -> None:
    """Has two models that swap on full devices; a's other copy is not active yet."""
    coming = structs.replace(active("a", "g2"), state="activating")
    models = [active("a", "g0", weight=60), active("b", "g1", weight=60, running=5), coming]
    units = [unit("g1", "a"), unit("g0", "b"), unit("g2", "a")]
    found = planned(models, [gpu("g0"), gpu("g1"), gpu("g2")], units)
    assert summary(found) == [("evict", "b", "g1")]


def test_replicas_beyond_the_target_go() -> None:
    models = [active("a", "g0"), active("a", "g1")]
    gpus = [gpu("g0"), gpu("g1"), gpu("g2")]
    assert summary(planned(models, gpus, [unit("g1", "a")])) == [("evict", "a", "g0")]
    more = planned(models, gpus, [unit("g0", "a"), unit("g1", "a"), unit("g2", "a")])
    assert summary(more) == [("activate", "a", "g2")]


def test_a_barred_or_dead_device_waits() -> None:
    models = [model("a", barred=("g0",)), model("b")]
    gpus = [gpu("g0"), gpu("g1", alive=False)]
    assert planned(models, gpus, [unit("g0", "a"), unit("g1", "b")]) == ()


def test_no_target_and_left_out_models_are_refused() -> None:
    asked = model("a", waiting=1)
    (refusal,) = target.plan(view([asked], [gpu("g0")]), SETTINGS)
    assert isinstance(refusal, Refuse)
    assert refusal.reason == "no placement was searched"
    (refusal,) = planned([asked], [gpu("g0")], [], a="no mesh has room")
    assert isinstance(refusal, Refuse)
    assert refusal.reason == "no mesh has room"


# --- any target is reached -----------------------------------------------------------------

NAMES = ("a", "b", "c", "d")
DEVICES = ("g0", "g1", "g2")
MESHES = (("g0",), ("g1",), ("g2",), ("g0", "g1"))


@st.composite
def targets(draw: st.DrawFn) -> Placement:
    """Draws a placement: a model in at most one unit, at most two parts of 40 on a device."""
    homes: dict[tuple[str, ...], list[str]] = {mesh: [] for mesh in MESHES}
    load = dict.fromkeys(DEVICES, 0)
    for name in NAMES:
        mesh = draw(st.sampled_from([None, *MESHES]))
        if mesh and all(load[d] + part(mesh) <= 100 for d in mesh):
            homes[mesh].append(name)
            for d in mesh:
                load[d] += part(mesh)
    return Placement(tuple(Unit(m, tuple(map(Hosted, names))) for m, names in homes.items()))


def part(mesh: tuple[str, ...]) -> int:
    return -(-41 // len(mesh))


def carry_out(seen: ClusterView, actions: Sequence[Action]) -> ClusterView:
    """Applies all actions, as if time had passed."""
    homes = {m.name: devices_of(m) for m in seen.models}
    for action in actions:
        match action:
            case Activate():
                homes[action.model] = (action.device, *action.peers)
            case Migrate():
                homes[action.model] = (action.target, *action.peers)
            case Evict():
                homes[action.model] = ()
    models = [
        active(n, h[0], weight=40, peers=h[1:], tp=len(h)) if h else model(n, 40)
        for n, h in homes.items()
    ]
    return replace(seen, models=tuple(models))


@given(targets(), targets())
@settings(max_examples=200, deadline=None)
def test_one_target_after_another_is_reached_without_overfilling(
    first: Placement, second: Placement
) -> None:
    seen = view([model(n, 40) for n in NAMES], [gpu(d) for d in DEVICES])
    for goal in (first, second):
        seen = replace(seen, target=goal)
        for _ in range(12):
            seen = carry_out(seen, target.plan(seen, SETTINGS))
            for device in DEVICES:
                here = [m for m in seen.models if device in devices_of(m)]
                assert sum(target.part_bytes(m, m.tp) for m in here) <= 100
        assert target.plan(seen, SETTINGS) == ()
        wanted = {h.model: u.devices for u in goal.units for h in u.models}
        found = {m.name: devices_of(m) for m in seen.models if m.device}
        assert found == wanted
