"""Aegaeon's algorithms: turns by hand from its equations, groups, and where batches go."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import structs

from prism.policies.baselines.aegaeon import decode_on, plan, prefill_on, quotas_s, search
from prism.policies.data import ModelView
from prism.policies.multiplexing.turns import InstanceTurn, PrefillGroup, PrefillQueue, TurnBatch
from tests.policies.clusters import SETTINGS, active, gpu, model, summary, view
from tests.policies.loads import problem, spec


def batch(model: str, step_s: float, switch_s: float, slo_s: float = 0.1) -> TurnBatch:
    return TurnBatch(model, step_s, slo_s, switch_s)


def test_turns_of_a_full_round_end_at_the_longest() -> None:
    """Checks n = 4 and 5, c = 2: sum 1/n = .45, alpha = 2 / (4 x 4) + .45 = .575, above .5.

    The turn of the slower batch is QMAX, 2 / (4 x .125), the other one 2 / (5 x .125).
    """
    found = quotas_s([batch("slow", 0.025, 1.5), batch("fast", 0.02, 0.5)])
    assert found == pytest.approx((4.0, 3.2))


def test_turns_of_a_round_with_time_to_spare_are_shorter() -> None:
    """Checks n = 10 and 10, c = .5: .5 / 40 + .2 = .2125 is below .5, so alpha is .5.

    Each turn is .5 / (10 x .3): 17 steps of 10 ms, 1.67 s of delivery, for a round of .83 s.
    """
    found = quotas_s([batch("a", 0.01, 0.25), batch("b", 0.01, 0.25)])
    assert found == pytest.approx((1 / 6, 1 / 6))


def test_all_turns_of_a_round_are_worth_the_same_part_of_it() -> None:
    """Checks 1 / alpha of the round, the paper's estimate of attainment; here alpha is 1.575."""
    batches = [batch(str(k), 0.005 * k, 0.1 * k, 0.04 * k**0.5) for k in range(1, 7)]
    quotas = quotas_s(batches)
    round_s = sum(quotas) + sum(b.switch_s for b in batches)
    worth = {round(q * b.slo_tpot_s / b.step_s, 9) for q, b in zip(quotas, batches, strict=True)}
    assert len(worth) == 1
    ahead = [b.slo_tpot_s / b.step_s for b in batches]
    alpha = 2.1 / (min(ahead) * 4.0) + sum(1 / n for n in ahead)
    assert worth.pop() * alpha == pytest.approx(round_s)
    assert max(quotas) == pytest.approx(4.0)


def test_one_batch_has_the_longest_turn() -> None:
    assert quotas_s([batch("a", 0.01, 0.3)], 2.5) == pytest.approx((2.5,))
    assert quotas_s([]) == ()


def test_without_switches_to_pay_turns_are_the_longest() -> None:
    assert quotas_s([batch("a", 0.01, 0.0), batch("b", 0.02, 0.0)]) == pytest.approx((2.0, 4.0))


def test_a_request_joins_a_group_that_is_not_full() -> None:
    busy = PrefillQueue((PrefillGroup("b", 1), PrefillGroup("a", 7)), 9.0)
    assert prefill_on("a", [PrefillQueue((), 0.0), busy]) == (1, 1)


def test_a_full_group_is_followed_by_a_new_one_where_least_is_to_be_done() -> None:
    full = PrefillQueue((PrefillGroup("a", 8),), 0.1)
    assert prefill_on("a", [PrefillQueue((), 2.0), full, PrefillQueue((), 1.0)]) == (1, None)
    assert prefill_on("b", [PrefillQueue((), 2.0), PrefillQueue((), 1.0)]) == (1, None)


def test_a_model_decodes_where_it_has_a_batch_else_where_fewest_do() -> None:
    assert decode_on("a", [["b"], ["c", "a"]]) == 1
    assert decode_on("d", [["b", "a"], ["c"], ["e"]]) == 1


def test_devices_are_divided_among_degrees_by_computation() -> None:
    models = [spec("large", "65b", tp=4, rate=4.0), spec("a", rate=3.0), spec("b", rate=3.0)]
    placement = search(problem(models, 16))
    sizes = [unit.tp for unit in placement.units]
    assert (sizes.count(4), sizes.count(1)) == (3, 4)
    assert {h.model for unit in placement.units if unit.tp == 1 for h in unit.models} == {"a", "b"}
    assert placement.refused == {}
    few = search(problem(models, 6))
    assert (few.refused.keys(), {unit.tp for unit in few.units}) == ({"large"}, {1})


# --- plans of the live cluster ------------------------------------------------------------

PLACEMENT = search(problem([spec("a"), spec("b"), spec("c")], 2))
PREFILLS, DECODES = (unit.devices for unit in PLACEMENT.units)


def planned(
    models: list[ModelView],
    turn: str | None,
    following: str | None = None,
    *,
    unbound: Mapping[str, int] = MappingProxyType({}),
    **more: Any,
) -> list[tuple[str, ...]]:
    """Returns the plan of the decoding device, a GPU with the attributes `more`."""
    turns = (
        InstanceTurn(PREFILLS, prefills=True),
        InstanceTurn(DECODES, False, turn, following, growth_bytes=20, quota_s=1.0),
    )
    gpus = [gpu(PREFILLS[0]), gpu(DECODES[0], **more)]
    given = view(models, gpus, target=PLACEMENT, turns=turns, unbound=unbound)
    return [summary(action) for action in plan(given, SETTINGS)]


def test_the_model_of_a_turn_comes_and_all_others_leave() -> None:
    d = DECODES[0]
    assert planned([model("a"), model("b")], "a") == [("activate", "a", d)]
    on, off = active("b", d), model("a")
    assert planned([on, off], "a", engines_free=0) == [("evict", "b", d), ("activate", "a", d)]
    busy = structs.replace(on, state="draining")
    assert planned([busy, off], "a", engines_free=0) == []
    assert planned([on, off], None) == [("evict", "b", d)]
    barred = structs.replace(off, barred=(d,))
    assert planned([on, barred], "a") == [("evict", "b", d)]


def test_the_following_model_comes_in_advance_where_it_fits() -> None:
    """Counts twice the KV that the turn may need: 40 bytes besides the 11 of the model. It leaves
    again if less than that KV is free."""
    d = DECODES[0]
    on, off = active("a", d), model("b")
    assert planned([on, off], "a", "b", free_bytes=51) == [("activate", "b", d)]
    assert planned([on, off], "a", "b", free_bytes=50) == []
    both = [on, active("b", d)]
    assert planned(both, "a", "b", free_bytes=20) == []
    assert planned(both, "a", "b", free_bytes=19) == [("evict", "b", d)]
    assert planned([on, off], "a", "b", engines_free=0) == []
    coming = structs.replace(on, state="activating")
    assert planned([coming, off], "a", "b") == []


def test_a_model_that_was_loaded_in_advance_leaves_for_one_that_has_no_room_else() -> None:
    d = DECODES[0]
    ahead, first = active("b", d), model("a")
    assert planned([ahead, first], "a", "b") == [("activate", "a", d)]
    expected = [("evict", "b", d), ("activate", "a", d)]
    assert planned([ahead, first], "a", "b", engines_free=0) == expected
    assert planned([ahead, first], "a", "b", free_bytes=10) == expected


def test_a_model_is_refused_that_none_can_prefill_or_none_decode() -> None:
    """Refuses none without requests. One that is refused leaves."""
    d, waits = DECODES[0], {"a": 1}
    assert planned([model("a")], None, unbound=waits) == []
    for device in (PREFILLS[0], d):
        barred = model("a", barred=(device,))
        assert planned([barred], None, unbound=waits) == [("refuse", "a")]
        assert planned([barred], None) == []
    there = active("a", d, barred=(PREFILLS[0],))
    assert planned([there], "a", unbound=waits) == [("evict", "a", d), ("refuse", "a")]
    assert planned([model("other")], None, unbound={"other": 1}) == [("refuse", "other")]
