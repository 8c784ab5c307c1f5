"""Placement compared on hand-made decisions: each class of difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lab.parity.parity_results import CLASSES, Compared
from lab.parity.placement import compare_placement
from lab.parity.runs import History, Placed
from tests.tools.parity.worlds import placed


def compared(live: Sequence[Placed], simulated: Sequence[Placed]) -> Compared:
    return compare_placement(History(tuple(live), {}), History(tuple(simulated), {}))


def test_the_same_decisions_are_equal_whenever_they_were_made() -> None:
    live = [placed("activate"), placed("evict")]
    later = [Placed(p.time_s + 2.0, *p.key[:1], p.model, *p.key[1:]) for p in live]
    found = compared(live, later)
    assert found.share == 1.0
    assert found.notes == {"mean time between equal decisions (ms)": 2000}


def test_models_are_matched_one_by_one() -> None:
    """Compares two models in another order: each sequence is the same."""
    a, b = placed("activate", "a"), placed("activate", "b")
    assert compared([a, b], [b, a]).share == 1.0


ONLY = {
    "migrate": "a migration in one world only",
    "evict": "an eviction in one world only",
    "activate": "an activation in one world only",
}


@pytest.mark.parametrize(("kind", "expected"), ONLY.items())
def test_what_one_world_did_not_do(kind: str, expected: str) -> None:
    before, only = placed("activate", device="host:9"), placed(kind, target="host:1")
    assert compared([before, only], [before]).classes == {expected: 1}
    assert compared([before], [before, only]).classes == {expected: 1}
    assert expected in CLASSES


def test_another_device_and_what_follows_from_it() -> None:
    live = [placed("activate"), placed("evict"), placed("activate")]
    simulated = [
        placed("activate", device="host:1"),
        placed("evict", device="host:1"),
        placed("activate"),
    ]
    found = compared(live, simulated)
    assert found.equal == 1
    assert found.classes == {"another device": 1, "follows another difference": 1}


def test_a_live_failure_is_a_class_of_its_own() -> None:
    failed = placed("activate", problem="no room")
    found = compared([failed, placed("activate")], [placed("activate")])
    assert (found.equal, found.total) == (1, 2)


def test_decisions_of_different_kinds_are_two_differences() -> None:
    found = compared([placed("activate")], [placed("evict", device="host:1")])
    assert (found.equal, found.total) == (0, 2)


def test_a_decision_more_shifts_none_of_the_others() -> None:
    kinds = ["activate", "evict"] * 4
    live = [placed(kind) for kind in kinds]
    found = compared(live, [placed("activate", device="host:1"), *live])
    assert (found.equal, found.total) == (8, 9)
