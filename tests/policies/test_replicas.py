"""Copies of a model: when one more, when one less, and where (decision 046)."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from prism.policies import prism
from prism.policies.data import Activate, Evict, ModelView
from tests.policies.clusters import SETTINGS, active, gpu, model, planned, view


def hot(name: str, device: str, **more: Any) -> ModelView:
    """Returns a model with a queue of 9 for 5 s, and an activation time of 2 s."""
    load = {"token_rate": 50.0, "waiting": 9, "running": 8, "oldest_wait_s": 5.0, "load_s": 2.0}
    return active(name, device, **{"replicas_max": 4, **load, **more})


def calm(name: str, device: str, **more: Any) -> ModelView:
    load = {"token_rate": 5.0, "running": 1, "idle_s": 0.0, "saturated_rate": 50.0}
    return active(name, device, **{"replicas_max": 4, **load, **more})


def four() -> list[Any]:
    return [gpu(f"host:{i}", free_bytes=80) for i in range(4)]


def test_a_saturated_model_gets_a_copy_where_pressure_is_least() -> None:
    other = active("b", "host:1", token_rate=9.0)
    assert planned([hot("a", "host:0"), other], four()) == [("activate", "a", "host:2")]


def test_a_copy_joins_also_where_memory_is_more_pressed() -> None:
    (action,) = prism.plan(view([hot("a", "host:0")], four()), SETTINGS)
    assert isinstance(action, Activate)
    assert action.joins
    assert "saturated" in action.reason
    # With half of the rate the other device is more pressed than the saturated one is now. What the
    # copy lacks is compute: its memory is free, and no requests wait there.
    busy = active("b", "host:1", token_rate=30.0)
    assert planned([hot("a", "host:0"), busy], four()[:2]) == [("activate", "a", "host:1")]
    queued = structs.replace(busy, waiting=5)
    assert planned([hot("a", "host:0"), queued], four()[:2]) == []


def test_no_copy_without_a_queue_that_lasts_and_a_rate_that_is_high() -> None:
    for change in (
        {"waiting": 1},
        {"oldest_wait_s": 1.9},
        {"load_s": 6.0},
        {"token_rate": 1.0},
        {"replicas_max": 1},
        {"slo_ttft_s": 10.0},
        {"owes_s": 0.1},
    ):
        assert planned([hot("a", "host:0", **change)], four()) == [], change


def test_one_at_a_time_and_no_more_than_the_bound() -> None:
    pair = [hot("a", "host:0"), hot("a", "host:1")]
    assert planned(pair, four()) == [("activate", "a", "host:2")]
    fresh = [pair[0], structs.replace(pair[1], owes_s=0.1)]
    assert planned(fresh, four()) == []
    coming = [*pair, model("a", device="host:2", state="activating", replicas_max=4)]
    assert planned(coming, four()) == []
    assert planned([structs.replace(m, replicas_max=2) for m in pair], four()) == []


def test_only_the_model_with_the_longest_queue_of_its_device_gets_a_copy() -> None:
    beside = hot("b", "host:0", waiting=4)
    assert planned([hot("a", "host:0"), beside], four())[:1] == [("activate", "a", "host:1")]


def test_a_copy_may_displace_what_was_idle_over_the_threshold() -> None:
    full = gpu("host:1", free_bytes=6)
    idle = active("b", "host:1", weight=90, idle_s=60.0)
    room = [gpu("host:0", free_bytes=80), full]
    assert planned([hot("a", "host:0"), idle], room) == [
        ("evict", "b", "host:1"),
        ("activate", "a", "host:1"),
    ]
    young = structs.replace(idle, idle_s=20.0)
    assert planned([hot("a", "host:0"), young], room) == []


def test_no_copy_while_a_model_without_any_lacks_memory() -> None:
    rooms = [gpu("host:0", free_bytes=80), gpu("host:1", capacity=60)]
    large = model("b", weight=95, waiting=1)
    here = [hot("a", "host:0"), active("c", "host:0", running=1)]
    assert planned([*here, large], rooms) == [("refuse", "b")]
    too_large = structs.replace(large, weight_bytes=200)
    expected = [("refuse", "b"), ("activate", "a", "host:1")]
    assert planned([*here, too_large], rooms) == expected


def test_a_copy_leaves_when_the_others_can_do_the_work() -> None:
    pair = [calm("a", "host:0", running=3), calm("a", "host:1", running=1)]
    assert planned(pair, four()) == [("evict", "a", "host:1")]
    (action,) = prism.plan(view(pair, four()), SETTINGS)
    assert isinstance(action, Evict)
    assert action.move_running, "its request may take longer than an eviction may"
    # The second would leave one 26 of the 50 that it can serve.
    for change in ({"waiting": 1}, {"owes_s": 1.0}, {"token_rate": 13.0}, {"replicas_min": 2}):
        assert planned([structs.replace(m, **change) for m in pair], four()) == [], change


def test_the_last_copy_stays_however_little_it_does() -> None:
    assert planned([calm("a", "host:0", token_rate=0.0)], four()) == []


def test_copies_make_way_for_a_model_without_any() -> None:
    """Moves running requests to the other copy; the last copy stays."""
    pair = [calm("a", "host:0", token_rate=30.0), calm("a", "host:1", token_rate=30.0)]
    rooms = [gpu(f"host:{i}", capacity=20, free_bytes=5) for i in range(2)]
    asked = model("b", waiting=1)
    plan = prism.plan(view([*pair, asked], rooms), SETTINGS)
    assert [type(a) for a in plan] == [Evict, Activate]
    assert isinstance(plan[0], Evict)
    assert plan[0].move_running
    two = [asked, model("c", waiting=1)]
    kinds = [type(a).__name__ for a in prism.plan(view([*pair, *two], rooms), SETTINGS)]
    assert kinds.count("Evict") == 1


def test_an_idle_copy_is_evicted_alone() -> None:
    """Evicts one copy; the other one has the same name and stays."""
    rooms = [gpu("host:0", capacity=20, free_bytes=0), gpu("host:1", capacity=20, free_bytes=0)]
    pair = [
        calm("a", "host:0", token_rate=40.0, running=2),
        active("a", "host:1", idle_s=60.0, token_rate=40.0, replicas_max=4),
        calm("b", "host:1", weight=1, token_rate=1.0, running=1),
    ]
    assert planned(pair, rooms) == [("evict", "a", "host:1")]


def test_two_devices_short_of_memory_lose_one_copy_of_a_model() -> None:
    """Plans one action per model at a time."""
    rooms = [gpu(f"host:{i}", capacity=20, free_bytes=0) for i in range(3)]
    three = [
        active("a", f"host:{i}", idle_s=60.0, token_rate=40.0, replicas_max=4) for i in range(3)
    ]
    three += [calm(f"b{i}", f"host:{i}", weight=1, token_rate=1.0, running=1) for i in range(3)]
    assert planned(three, rooms) == [("evict", "a", "host:0")]


def test_as_many_as_the_least_come_up_without_load() -> None:
    one = active("a", "host:0", replicas_min=2, replicas_max=4)
    assert planned([one], four()) == [("activate", "a", "host:1")]
    full = [gpu("host:0", free_bytes=80), gpu("host:1", free_bytes=6)]
    unused = active("b", "host:1", weight=90, idle_s=60.0)
    assert planned([one, unused], full) == [("evict", "b", "host:1"), ("activate", "a", "host:1")]


def test_a_copy_of_a_wide_model_has_devices_of_its_own() -> None:
    wide = hot("a", "host:0", weight=20, tp=2, peers=("host:1",), replicas_max=2)
    (action,) = prism.plan(view([wide], four()), SETTINGS)
    assert isinstance(action, Activate)
    assert {action.device, *action.peers} == {"host:2", "host:3"}


def test_balance_leaves_models_with_copies_where_they_are() -> None:
    pressed = [
        active("a", "host:0", token_rate=30.0, waiting=9, running=9, replicas_max=2),
        active("a", "host:1", token_rate=30.0, running=9, replicas_max=2),
        active("b", "host:0", token_rate=20.0, waiting=9, running=9),
    ]
    moved = planned(pressed, [gpu(f"host:{i}", free_bytes=50) for i in range(3)])
    assert all(action[1] != "a" for action in moved)


def idle(name: str, device: str, **more: Any) -> ModelView:
    return active(name, device, weight=80, idle_s=60.0, replicas_max=4, **more)


def test_one_plan_takes_one_copy_of_a_model() -> None:
    """Plans one action per model, as the live system executes them."""
    pair = [idle("a", "host:0"), idle("a", "host:1")]
    asked = [model(name, weight=80, waiting=1) for name in "bc"]
    evicted = [a for a in planned([*pair, *asked], four()[:2]) if a[0] == "evict"]
    assert evicted == [("evict", "a", "host:0")]
    coming = model("a", device="host:1", state="activating", replicas_max=4, weight=80)
    assert planned([pair[0], coming, asked[0]], four()[:2]) == [("refuse", "b")]


def test_a_wide_model_displaces_at_most_one_copy_of_another() -> None:
    pair = [idle("a", "host:0"), idle("a", "host:1")]
    wide = model("w", weight=160, waiting=1, tp=2)
    assert planned([*pair, wide], four()[:2]) == [("refuse", "w"), ("evict", "a", "host:0")]
    three = [*pair, idle("d", "host:2")]
    evicted = {a[1:] for a in planned([*three, wide], four()[:3]) if a[0] == "evict"}
    assert evicted == {("a", "host:0"), ("d", "host:2")}
