"""Default shrink policy, on data alone: the clients to ask, and for how much."""

from __future__ import annotations

from kvcached import Holder, spares_then_idle_caches
from kvcached.memory_requests import plan


def holder(name: str, held: int = 100, **facts: float) -> Holder:
    given = {"min": 0, "spare": 0, "evictable": 0, "asked": 0} | facts
    return Holder(
        key=(ord(name), 1),
        name=name,
        pid=1,
        held_bytes=held,
        min_bytes=int(given["min"]),
        spare_bytes=int(given["spare"]),
        evictable_bytes=int(given["evictable"]),
        asked_bytes=int(given["asked"]),
        idle_s=facts.get("idle_s", 0.0),
        waits=bool(facts.get("waits", 0)),
        answers=bool(facts.get("answers", 1)),
    )


def demands(missing_bytes: int, *holders: Holder) -> dict[str, int | None]:
    return {
        d.holder.name: d.size_bytes for d in plan(missing_bytes, holders, spares_then_idle_caches)
    }


def test_spares_of_all_go_before_the_cache_of_any() -> None:
    a, b = holder("a", spare=10, evictable=50, idle_s=9), holder("b", spare=20)
    assert demands(25, a, b) == {"a": 10, "b": 15}
    assert demands(35, a, b) == {"a": 15, "b": 20}


def test_idle_clients_go_first_then_those_that_hold_most_above_their_minimum() -> None:
    busy = holder("a", held=1000, evictable=900)
    idle = holder("b", held=50, evictable=30, idle_s=5)
    large = holder("c", held=500, evictable=30, idle_s=5, min=100)
    assert demands(10, busy, idle, large) == {"c": 10}
    assert demands(40, busy, idle, large) == {"c": 30, "b": 10}
    assert demands(70, busy, idle, large) == {"c": 30, "b": 30, "a": 10}


def test_nobody_is_asked_below_a_minimum() -> None:
    assert demands(100, holder("a", held=100, min=90, evictable=60, spare=40)) == {"a": 10}
    assert demands(100, holder("a", held=100, min=100, evictable=60)) == {}


def test_what_is_on_the_way_is_not_asked_for_again() -> None:
    a = holder("a", evictable=60, asked=40)
    assert demands(40, a) == {}
    assert demands(50, a) == {"a": 10}
    assert demands(500, a) == {"a": 20}
    assert demands(500, holder("a", evictable=60, asked=2**64 - 1)) == {}


def test_who_waits_or_does_not_answer_is_left_alone() -> None:
    stopped, waiting = holder("a", spare=50, answers=0), holder("b", spare=50, waits=1)
    assert demands(10, stopped, waiting) == {}
    assert demands(10, stopped, waiting, holder("c", spare=3)) == {"c": 3}
