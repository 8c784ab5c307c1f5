"""Turns of models on instances, without a clock or requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prism.policies.multiplexing.turns import PrefillGroup, TurnBatch
from prism.scheduler.token_turns import DecodeTurns, PrefillTurns, prefill_count


def quotas_s(batches: Sequence[TurnBatch]) -> tuple[float, ...]:
    return tuple(batch.step_s for batch in batches)


def batches(*models: str) -> list[TurnBatch]:
    return [TurnBatch(model, float(n), 0.1, 0.0) for n, model in enumerate(models, 1)]


def test_each_model_with_requests_has_one_turn_in_a_round() -> None:
    turns, models = DecodeTurns(quotas_s), ["a", "b", "c"]

    def following() -> tuple[str, float] | None:
        return turns.next(models, lambda: batches(*models))

    assert [following(), following()] == [("a", 1.0), ("b", 2.0)]
    models.remove("c")
    models.append("d")
    assert [following() for _ in range(4)] == [("a", 1.0), ("b", 2.0), ("d", 3.0), ("a", 1.0)]
    models.clear()
    assert following() is None


def test_the_following_turn_is_the_next_in_the_round_or_the_first_of_another_one() -> None:
    turns, models = DecodeTurns(quotas_s), ["a", "b", "c"]
    turns.next(models, lambda: batches(*models))
    assert turns.following("a", models) == "b"
    assert turns.following("a", ["a", "c"]) == "c"
    turns.next(models, lambda: batches(*models))
    turns.next(models, lambda: batches(*models))
    assert turns.following("c", models) == "a"
    assert turns.following("c", ["c"]) is None


def test_a_group_of_another_model_has_a_switch_before_it() -> None:
    turns: PrefillTurns[int] = PrefillTurns()
    add = turns.add
    add(1, "a", None, prompt_s=1.0, switch_s=10.0, resident="a")
    add(2, "b", None, prompt_s=2.0, switch_s=20.0, resident="a")
    add(3, "a", None, prompt_s=4.0, switch_s=40.0, resident="a")
    add(4, "b", 1, prompt_s=8.0, switch_s=20.0, resident="a")
    queue = turns.view(left_s=0.5)
    assert queue.groups == (PrefillGroup("a", 1), PrefillGroup("b", 2), PrefillGroup("a", 1))
    assert queue.load_s == 0.5 + 60.0 + 15.0
    assert turns.following == "b"


@pytest.mark.parametrize(
    ("part", "instances", "expected"), [(0.375, 16, 6), (0.375, 2, 1), (0.9, 2, 1), (0.01, 5, 1)]
)
def test_one_instance_at_least_has_each_role(part: float, instances: int, expected: int) -> None:
    assert prefill_count(part, instances) == expected
