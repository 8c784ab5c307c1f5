"""Admission compared on hand-made queues: what is a choice, what is equal, each class."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.parity.admission import (
    compare_devices,
    compare_order,
    compare_pairs,
    compare_positions,
)
from lab.parity.parity_results import CLASSES
from lab.parity.runs import History
from tests.tools.parity.worlds import left, queued, run, stepped

BOTH = (queued(0, 0.0), queued(1, 0.1))


def test_the_same_order_is_equal() -> None:
    world = run(*BOTH, stepped(1.0, 0), stepped(2.0, 1))
    found = compare_order(world, world)
    assert (found.equal, found.differences, found.share) == (1, [], 1.0)
    assert found.notes == {"no other request waited": 1, "no common choice": 0}


def test_the_order_within_a_step_counts() -> None:
    live, simulated = run(*BOTH, stepped(1.0, 0, 1)), run(*BOTH, stepped(1.0, 1, 0))
    assert compare_order(live, live).share == 1.0
    assert compare_order(live, simulated).share == 0.0


def test_who_does_not_wait_in_both_worlds_is_no_common_choice() -> None:
    live = run(*BOTH, stepped(1.0, 0), stepped(2.0, 1))
    simulated = run(queued(0, 0.0), stepped(0.0, 0), queued(1, 0.1), stepped(0.1, 1))
    found = compare_order(live, simulated)
    assert found.total == 0
    assert found.share is None
    assert found.notes["no common choice"] == 1


def test_only_the_last_stay_counts() -> None:
    """Queues a request that was handed back after those that came meanwhile."""
    live = run(*BOTH, left(0.5, 0), queued(0, 0.6), stepped(1.0, 1), stepped(2.0, 0))
    assert live.waits[0].queued > live.waits[1].queued


def test_a_dispatch_is_one_decision_and_every_pair_one_comparison() -> None:
    three = (*BOTH, queued(2, 0.2))
    live = run(*three, stepped(1.0, 0), stepped(2.0, 1), stepped(3.0, 2))
    simulated = run(*three, stepped(1.0, 2), stepped(2.0, 0), stepped(3.0, 1))
    order, pairs = compare_order(live, simulated), compare_pairs(live, simulated)
    assert (order.equal, order.total) == (0, 2)
    assert (pairs.equal, pairs.total) == (1, 3)


def test_one_that_overtakes_many_is_one_turn() -> None:
    four = (*BOTH, queued(2, 0.2), queued(3, 0.3))
    live = run(*four, *(stepped(float(1 + n), n) for n in range(4)))
    simulated = run(*four, *(stepped(float(1 + n), who) for n, who in enumerate((3, 0, 1, 2))))
    assert (compare_order(live, simulated).equal, compare_order(live, simulated).total) == (0, 3)
    turns = compare_positions(live, simulated)
    assert (turns.equal, turns.total) == (3, 4)
    assert "3 of a" in turns.differences[0].text
    assert compare_positions(live, live).share == 1.0


def test_turns_are_of_those_who_had_a_common_choice() -> None:
    alone = (queued(9, 5.0), stepped(5.0, 9))
    live = run(*BOTH, stepped(1.0, 0), stepped(2.0, 1), *alone)
    assert compare_positions(live, live).total == 2


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(7)))
def test_the_fewest_turns_by_brute_force(order: list[int]) -> None:
    all_wait = tuple(queued(n, n / 10) for n in range(7))
    live = run(*all_wait, *(stepped(1.0 + n, n) for n in range(7)))
    simulated = run(*all_wait, *(stepped(1.0 + n, who) for n, who in enumerate(order)))
    longest = max(
        len(kept)
        for size in range(8)
        for kept in combinations(order, size)
        if list(kept) == sorted(kept)
    )
    assert compare_positions(live, simulated).equal == longest


def blocked_live(verdict: str) -> tuple[History, History]:
    """Returns the live and the simulated run.

    Live, request 1 of model b passes request 0 of model a, which could not start.
    """
    both = (queued(0, 0.0, "a"), queued(1, 0.1, "b"))
    live = run(*both, stepped(1.0, 1, blocked={"a": verdict}), stepped(2.0, 0))
    return live, run(*both, stepped(1.0, 0), stepped(2.0, 1))


VERDICTS = {
    "not ready": "activation timing",
    "slots": "running slots",
    "prefill": "prefill in flight",
    "limit": "KV limit",
    "memory": "free memory",
}


@pytest.mark.parametrize(("verdict", "kind"), VERDICTS.items())
def test_a_model_that_could_not_start_in_one_world(verdict: str, kind: str) -> None:
    live, simulated = blocked_live(verdict)
    assert compare_order(live, simulated).classes == {kind: 1}
    assert compare_order(simulated, live).classes == {kind: 1}
    assert kind in CLASSES


def test_requests_that_came_the_other_way_round() -> None:
    live = run(queued(1, 0.0), queued(0, 0.1), stepped(1.0, 1), stepped(2.0, 0))
    simulated = run(*BOTH, stepped(1.0, 0), stepped(2.0, 1))
    assert compare_order(live, simulated).classes == {"arrival order": 1}


def test_a_request_that_was_late_in_one_world() -> None:
    due = (queued(0, 0.0, deadline_s=1.5), queued(1, 0.1))
    live = run(*due, stepped(2.0, 1), stepped(3.0, 0))
    simulated = run(*due, stepped(1.0, 0), stepped(2.0, 1))
    assert compare_order(live, simulated).classes == {"lateness": 1}


def test_otherwise_estimates_differ() -> None:
    live = run(*BOTH, stepped(1.0, 1), stepped(2.0, 0))
    simulated = run(*BOTH, stepped(1.0, 0), stepped(2.0, 1))
    assert compare_order(live, simulated).classes == {"time estimates": 1}


def test_devices_of_requests() -> None:
    live = run(*BOTH, stepped(1.0, 0), stepped(2.0, 1))
    simulated = run(queued(0, 0.0), stepped(1.0, 0))
    found = compare_devices(live, simulated)
    assert (found.equal, found.classes) == (1, {"model placed elsewhere": 1})
