"""Models that are given up when the devices cannot serve all of them, and what else is evicted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from prism.policies import prism
from prism.policies.bins import current_bins
from prism.policies.data import ClusterView, Degree, ModelView, Refuse, Traffic
from prism.policies.planning import overload
from prism.policies.planning.builder import PlanBuilder
from tests.policies.clusters import SETTINGS, active, gpu, model, planned, view

GPUS = [gpu("g0", free_bytes=5), gpu("g1", free_bytes=5)]


def asked(rate_rps: float = 1.0, busy_part: float = 1.0, **more: Any) -> Traffic:
    return Traffic(
        requests=int(600 * rate_rps),
        rate_rps=rate_rps,
        peak_rps=rate_rps,
        mean_rps=rate_rps,
        prompt_tokens=1.0,
        prompt_p99_tokens=1.0,
        output_tokens=1.0,
        busy_part=busy_part,
        **more,
    )


def served(name: str, device: str, rate_rps: float = 1.0, **more: Any) -> ModelView:
    traffic = more.pop("traffic", asked(rate_rps))
    return active(name, device, **{"weight": 40, "running": 1, "traffic": traffic, **more})


def full(**more: Any) -> list[ModelView]:
    """Makes four models that use all memory that models can use, and always have requests."""
    return [served(f"m{i}", f"g{i // 2}", **more) for i in range(4)]


def late(rate_rps: float = 1.0, **more: Any) -> ModelView:
    return model("late", **{"weight": 40, "waiting": 3, "traffic": asked(rate_rps), **more})


def given_up(seen: ClusterView) -> set[str]:
    return overload.given_up(PlanBuilder(seen, SETTINGS, current_bins(seen.models, seen.gpus)))


def refusals(models: list[ModelView], **more: Any) -> list[Refuse]:
    actions = prism.plan(view(models, GPUS, **more), SETTINGS)
    return [a for a in actions if isinstance(a, Refuse)]


def test_nothing_is_given_up_while_all_fit_or_take_turns() -> None:
    assert given_up(view(full(), GPUS)) == set()
    turns = asked(busy_part=0.5)
    halves = [*full(traffic=turns), late(traffic=turns)]
    assert given_up(view(halves, GPUS)) == set()
    assert given_up(view([late()], [])) == set()


def test_the_fewest_requests_for_their_memory_are_given_up() -> None:
    assert given_up(view([*full(), late(0.2)], GPUS)) == {"late"}
    rare = [*full()[:3], served("rare", "g1", 0.1), late()]
    assert given_up(view(rare, GPUS)) == {"rare"}
    large = [*full(rate_rps=0.3), late(1.0, weight=85)]
    assert not given_up(view(large, GPUS)) & {"late"}


def test_a_model_that_is_served_stays_although_another_has_slightly_more_requests() -> None:
    assert given_up(view([*full(), late(1.4)], GPUS)) == {"late"}
    assert "late" not in given_up(view([*full(), late(1.6)], GPUS))


def test_never_evict_is_never_given_up() -> None:
    assert given_up(view([*full(never_evict=True), late(0.2)], GPUS)) == {"late"}
    kept = given_up(view([*full(), late(0.2, never_evict=True)], GPUS))
    assert kept == {"m0"}


def test_compute_counts_for_the_value_but_is_no_reason() -> None:
    slow = {1: Degree(1, 1, 1, prefill_tokens_per_s=1.0)}
    here = [active(f"m{i}", "g0", weight=1, traffic=asked(0.7), degrees=slow) for i in range(4)]
    assert given_up(view(here, GPUS)) == set()
    rest = [*full()[:3], served("slow", "g1", degrees=slow)]
    assert given_up(view([*rest, late()], GPUS)) == {"slow"}


def test_a_refusal_for_overload_says_so_in_each_plan() -> None:
    (refusal,) = refusals([*full(), late(0.2)])
    assert refusal.overload
    assert refusal.reason.startswith("overload: it has fewer requests for its 0.0 MiB than")
    again = late(0.2, waiting=0, deferred=True)
    assert refusals([*full(), again], rebalance=False) == [refusal]


def test_a_model_that_is_given_up_returns_where_memory_is_to_spare() -> None:
    again = late(0.1, waiting=0, deferred=True)
    spare = [*GPUS, gpu("g2", capacity=45)]
    assert given_up(view([*full(weight=45), again], spare)) == {"late"}
    assert planned([*full(weight=45), again], spare) == [("activate", "late", "g2")]
    busy = served("busy", "g2", weight=1)
    assert planned([*full(weight=45), busy, again], spare) == [("refuse", "late")]


def test_a_model_that_is_given_up_takes_the_memory_of_an_idle_one() -> None:
    again = late(0.1, waiting=0, deferred=True)
    idle = served("idle", "g1", 0.5, weight=45, running=0, idle_s=46.0)
    models = [*full(weight=45)[:3], idle, again]
    assert planned(models, GPUS) == [("evict", "idle", "g1"), ("activate", "late", "g1")]
    silent = structs.replace(again, traffic=structs.replace(again.traffic, rate_rps=0.0))
    assert planned([*models[:4], silent], GPUS)[0] == ("refuse", "late")


def test_a_busy_model_is_evicted_only_if_it_is_given_up() -> None:
    rare = [*full()[:3], served("rare", "g1", 0.1, running=2)]
    assert planned([*rare, late()], GPUS) == [
        ("evict", "rare", "g1"),
        ("activate", "late", "g0"),
    ] or (planned([*rare, late()], GPUS) == [("evict", "rare", "g1"), ("activate", "late", "g1")])
    young = [structs.replace(m, owes_s=1.0) for m in rare]
    assert planned([*young, late()], GPUS) == [("refuse", "late")]


def test_requests_of_a_model_that_drains_are_rejected() -> None:
    rare = structs.replace(served("rare", "g1", 0.1), state="draining")
    assert ("rare", True) in [(r.model, r.overload) for r in refusals([*full()[:3], rare, late()])]


def test_no_model_alone_is_given_up_and_newcomers_evict_no_busy_one() -> None:
    """Has the first request of a model, whose traffic is not known yet, and a large busy one."""
    large = served("large", "g0", 10.0, weight=90, running=50)
    first = model("first", 50, waiting=1)
    assert given_up(view([large, first], GPUS[:1])) == set()
    assert planned([large, first], GPUS[:1]) == [("refuse", "first")]
    both = [large, late(0.2), first]
    assert given_up(view(both, GPUS[:1])) == {"late"}
    assert ("evict", "large", "g0") not in planned(both, GPUS[:1])


def test_a_model_that_fits_nowhere_takes_no_share_of_the_others() -> None:
    huge = model("huge", 150, waiting=1, traffic=asked(5.0))
    here = [served("here", "g0", weight=80), huge, late(waiting=1)]
    assert given_up(view(here, GPUS)) == set()
    assert ("activate", "late", "g1") in planned(here, [GPUS[0], gpu("g1")])


def test_requests_are_rejected_for_as_long_as_a_busy_model_drains() -> None:
    rare = structs.replace(served("rare", "g1", 0.1, waiting=4), state="draining")
    coming = structs.replace(late(waiting=0), state="activating", device="g1")
    assert [(r.model, r.overload) for r in refusals([*full()[:3], rare, coming])] == [
        ("rare", True)
    ]


def test_what_was_given_up_is_served_again_at_nine_tenths_of_the_memory() -> None:
    again = late(0.01, waiting=0, deferred=True, weight=2)
    assert given_up(view([*full(), again], GPUS)) == {"late"}
    assert given_up(view([*full(), late(0.01, weight=2)], GPUS)) == set()


def test_a_cold_model_leaves_although_a_hot_one_would_make_room_alone() -> None:
    hot = active("hot", "g0", weight=90, idle_s=2.0, traffic=asked(1.0, busy_part=0.01))
    cold = active("cold", "g1", weight=50, idle_s=40.0, traffic=asked(0.002, busy_part=0.01))
    busy = active("busy", "g1", weight=30, running=1)
    wants = model("wants", 60, waiting=2, traffic=asked(0.02, busy_part=0.01))
    assert planned([hot, cold, busy, wants], GPUS)[0] == ("evict", "cold", "g1")


@pytest.mark.parametrize(("rate_rps", "leaves"), [(0.01, True), (1.0, False)])
def test_a_model_that_was_just_idle_leaves_for_one_that_is_worth_more(
    rate_rps: float, leaves: bool
) -> None:
    """Expects 0.45 or, idle for 2 s, 22 requests of it in 45 s. 3 wait, and 1 more is expected."""
    idle = active("idle", "g0", weight=90, idle_s=2.0, traffic=asked(rate_rps, busy_part=0.01))
    wants = model("wants", 90, waiting=3, traffic=asked(0.02, busy_part=0.01))
    actions = planned([idle, wants], [gpu("g0", free_bytes=5)])
    assert (actions[0] == ("evict", "idle", "g0")) is leaves
