"""Time of the next plan of the prism policy: no later than the plan changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.policies.data import ClusterView
from prism.policies.planning.model_copies import RATE_INTERVAL_S
from prism.policies.planning.next_plan import MARGIN_S, next_plan_in_s
from prism.policies.prism import plan
from tests.policies.clusters import SETTINGS, active, clusters, gpu, model, summary, view


def later(now: ClusterView, seconds: float) -> ClusterView:
    """Returns the view after `seconds` in which nothing but time changes."""
    models = tuple(
        structs.replace(
            m,
            idle_s=m.idle_s + seconds,
            owes_s=max(0.0, m.owes_s - seconds),
            oldest_wait_s=m.oldest_wait_s + seconds if m.waiting else 0.0,
        )
        for m in now.models
    )
    return replace(now, now_s=now.now_s + seconds, models=models)


def plans(now: ClusterView) -> list[tuple[Any, ...]]:
    return [summary(action) for action in plan(now, SETTINGS)]


@st.composite
def quiet(draw: st.DrawFn) -> ClusterView:
    """Models that have been up, idle or asked for various times."""
    found = draw(clusters())
    models = tuple(
        structs.replace(
            m,
            owes_s=draw(st.sampled_from([0.0, 0.3, 2.0])) if m.state == "active" else 0.0,
            idle_s=draw(st.sampled_from([0.0, 0.4, 0.9, 1.5, 44.5, 46.0])),
            waiting=draw(st.sampled_from([0, 1, 5])),
            oldest_wait_s=draw(st.sampled_from([0.0, 0.7, 3.0])),
            load_s=draw(st.sampled_from([0.0, 1.0])),
            replicas_max=draw(st.sampled_from([1, 3])),
        )
        for m in found.models
    )
    return replace(found, models=models, rebalance=False)


@settings(max_examples=400, deadline=None)
@given(quiet(), st.floats(0.0, 0.99))
def test_a_plan_holds_for_as_long_as_it_says(now: ClusterView, part: float) -> None:
    patience = next_plan_in_s(now, SETTINGS)
    assert patience > 0
    seconds = 100.0 if math.isinf(patience) else patience
    assert plans(later(now, part * seconds)) == plans(now)


@pytest.mark.parametrize(
    ("idle_s", "owes_s", "seconds"),
    [(0.25, 0.0, 0.751), (0.25, 0.5, 0.501), (20.0, 0.0, 25.001), (50.0, 0.0, math.inf)],
)
def test_who_waits_for_a_place_is_seated_when_one_may_leave(
    idle_s: float, owes_s: float, seconds: float
) -> None:
    busy = active("busy", "g0", weight=60, idle_s=idle_s, owes_s=owes_s)
    now = view([busy, model("a", 60, waiting=1)], [gpu("g0", free_bytes=40)], rebalance=False)
    assert next_plan_in_s(now, SETTINGS) == pytest.approx(seconds)


@pytest.mark.parametrize("early_s", [1e-12, -1e-12])
def test_a_look_that_comes_early_by_rounding_is_not_repeated_at_once(early_s: float) -> None:
    """Prevents that times which differ in their last digit cause plans at different times."""
    idle_s = SETTINGS.min_idle_s + MARGIN_S - early_s
    models = [active("a", "g0", weight=60, idle_s=idle_s), model("b", 60, waiting=1)]
    now = view(models, [gpu("g0", free_bytes=40)], rebalance=False)
    assert next_plan_in_s(now, SETTINGS) == pytest.approx(
        SETTINGS.idle_threshold_s - idle_s, abs=0.01
    )


def test_without_anybody_who_waits_there_is_no_hurry() -> None:
    now = view([active("a", "g0", idle_s=0.5), model("b")], [gpu("g0")], rebalance=False)
    assert next_plan_in_s(now, SETTINGS) == math.inf


def test_a_queue_gets_its_copy_when_it_has_lasted() -> None:
    """Checks any step, since the scheduling interval only limits migrations."""
    hot = active(
        "a",
        "g0",
        token_rate=9.0,
        running=2,
        waiting=3,
        oldest_wait_s=0.25,
        replicas_max=2,
        load_s=2.0,
    )
    now = view([hot], [gpu("g0"), gpu("g1")], rebalance=False)
    assert next_plan_in_s(now, SETTINGS) == 1.75
    assert not plans(later(now, 1.7))
    assert plans(later(now, 1.75)) == [("activate", "a", "g1")]


def test_a_copy_without_room_is_tried_again_as_rates_come() -> None:
    """Checks that plans follow the interval of reports, since evictions for a copy depend on rates.

    The scheduling interval ended 1.4 s later in a simulation than live.
    """
    hot = active("a", "g0", token_rate=9.0, waiting=5, oldest_wait_s=3.0, replicas_max=2)
    now = view([hot], [gpu("g0")], rebalance=False)
    assert not plans(now)
    assert next_plan_in_s(now, SETTINGS) == RATE_INTERVAL_S
    alone = view([structs.replace(hot, replicas_max=1)], now.gpus, rebalance=False)
    assert next_plan_in_s(alone, SETTINGS) == math.inf
