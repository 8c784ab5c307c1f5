"""Membership of Ray's machines: which of them become nodes, and when."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prism.serve.on_ray.membership import JOIN_S, LEAVE_S, Membership
from prism.serve.on_ray.ray_machines import RayMachine

LOOK_S = 3.0


def of(names: str) -> list[RayMachine]:
    return [RayMachine(name, {}) for name in names]


def names(machines: Sequence[RayMachine] | None) -> str | None:
    return None if machines is None else "".join(each.address for each in machines)


def wanted(membership: Membership, there: str, now_s: float) -> str | None:
    membership.observe(of(there), now_s)
    return names(membership.wanted(now_s))


def test_a_machine_joins_last_when_it_has_been_there_for_some_time() -> None:
    membership = Membership(of("cb"))
    assert wanted(membership, "abc", 0) is None
    assert wanted(membership, "abc", JOIN_S - 1) is None
    assert wanted(membership, "bc", JOIN_S) is None
    assert wanted(membership, "abc", JOIN_S + 1) is None
    assert wanted(membership, "abc", 2 * JOIN_S) is None
    assert wanted(membership, "abc", 2 * JOIN_S + 1) == "cba"


def test_a_machine_is_dropped_when_it_has_been_away_for_long() -> None:
    membership = Membership(of("abc"))
    assert wanted(membership, "ac", 0) is None
    assert wanted(membership, "abc", LEAVE_S - 1) is None
    assert wanted(membership, "ac", LEAVE_S) is None
    assert wanted(membership, "ac", 2 * LEAVE_S - 1) is None
    assert wanted(membership, "ac", 2 * LEAVE_S) == "ac"
    assert wanted(membership, "", 2 * LEAVE_S) == "ac"
    membership.applied(of("ac"))
    assert wanted(membership, "", 2 * LEAVE_S + 1) is None
    assert wanted(membership, "", 9 * LEAVE_S) is None, "a cluster keeps its last machines"


def test_who_comes_is_first_and_who_goes_is_next() -> None:
    membership = Membership(of("ab"))
    assert wanted(membership, "ac", 0) is None
    assert wanted(membership, "ac", LEAVE_S) == "abc"
    membership.applied(of("abc"))
    assert wanted(membership, "ac", LEAVE_S) == "ac"


def test_what_was_refused_is_tried_later_and_later() -> None:
    membership = Membership(of("ab"))
    assert wanted(membership, "ac", 0) is None
    now_s, waits_s = LEAVE_S, []
    for _ in range(7):
        assert wanted(membership, "ac", now_s) == "abc"
        waits_s.append(membership.rejected(of("abc"), now_s))
        assert wanted(membership, "ac", now_s + waits_s[-1] - 1) == "a", "another change"
        now_s += waits_s[-1]
    assert waits_s == [30, 60, 120, 240, 480, 900, 900]
    membership.applied(of("a"))
    assert membership.rejected(of("abc"), now_s) == 30


def test_machines_that_flap_make_few_changes() -> None:
    """Adds only machines that were there at each look of the last seconds.

    Removes only those that were away at each.
    """
    for seed in range(20):
        draw, membership = random.Random(seed), Membership(of("ab"))
        until_s = dict.fromkeys("abcde", 0.0)
        there: set[str] = set()
        looks: list[tuple[float, set[str]]] = []
        changes = 0
        for look in range(2000):
            now_s = look * LOOK_S
            for name in until_s:
                if now_s >= until_s[name]:
                    there ^= {name}
                    until_s[name] = now_s + draw.expovariate(1 / draw.choice([5, 40, 300]))
            looks.append((now_s, set(there)))
            before = names(membership.machines)
            after = wanted(membership, "".join(sorted(there)), now_s)
            if before is None or after is None:
                continue
            for name in set(after) ^ set(before):
                came = name in after
                lasts_s = JOIN_S if came else LEAVE_S
                recent = [seen for at_s, seen in looks if at_s >= now_s - lasts_s]
                assert all((name in seen) == came for seen in recent)
            assert after.startswith(before) or set(after) < set(before)
            changes += 1
            membership.applied(of(after))
        assert 0 < changes <= 2 * len(until_s) * 2000 * LOOK_S / LEAVE_S
