"""Compute in placement and moves: requests that are late because of other models."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from prism.policies import kvpr, prism
from prism.policies.bins import current_bins
from prism.policies.data import NO_TRAFFIC, Degree, ModelView, Settings, Traffic
from prism.policies.latency import busy_share, late_rps
from tests.policies.clusters import SETTINGS, active, gpu, model, planned, view

SPEED = {1: Degree(10, 1, 1, prefill_tokens_per_s=1000.0, step_s=0.001)}


def busy(share: float, **more: Any) -> dict[str, Any]:
    """Returns traffic that computes for `share` of the time; its longest prompts need 0.6 s."""
    traffic = Traffic(
        requests=600,
        rate_rps=share / 0.1,
        peak_rps=share / 0.1,
        mean_rps=share / 0.1,
        prompt_tokens=100.0,
        prompt_p99_tokens=600.0,
        output_tokens=0.0,
        busy_part=1.0,
    )
    return {"traffic": traffic, "degrees": SPEED, **more}


def two_late(**more: Any) -> list[ModelView]:
    return [
        active("a", "g0", running=1, token_rate=1.0, **busy(0.4, **more)),
        active("b", "g0", running=1, token_rate=1.0, **busy(0.45, **more)),
    ]


def test_requests_are_late_only_because_of_each_other() -> None:
    one, other = two_late()
    assert abs(busy_share(one) - 0.4) < 1e-9
    assert late_rps([one]) == late_rps([other]) == 0.0
    assert 0.0 < late_rps([one, other]) <= 8.5


def test_a_model_moves_off_a_device_on_which_both_are_late() -> None:
    (action,) = prism.plan(view(two_late(), [gpu("g0"), gpu("g1")]), SETTINGS)
    assert (action.model, action.source, action.target) == ("a", "g0", "g1")
    assert "late" in action.reason
    assert planned(two_late(), [gpu("g0"), gpu("g1")], rebalance=False) == []


def test_no_move_helps_or_is_possible() -> None:
    hot = active("c", "g1", running=1, **busy(0.9))
    gpus = [gpu("g0"), gpu("g1")]
    assert planned([*two_late(), hot], gpus) == []
    assert planned(two_late(), [gpu("g0"), gpu("g1", free_bytes=5)]) == []
    pinned = [structs.replace(m, pinned_device="g0") for m in two_late()]
    assert planned(pinned, gpus) == []


def test_a_model_is_placed_where_fewer_requests_are_late_even_at_a_higher_kvpr() -> None:
    computes = active("a", "g0", **busy(0.5))
    holds = active("b", "g1", token_rate=50.0)
    new = model("new", waiting=1, **busy(0.4))
    assert planned([computes, holds, new], [gpu("g0"), gpu("g1")])[0] == ("activate", "new", "g1")
    slack = model("new", waiting=1, **busy(0.05))
    calm = active("a", "g0", **busy(0.1))
    assert planned([calm, holds, slack], [gpu("g0"), gpu("g1")])[0] == ("activate", "new", "g0")


def three(**more: Any) -> list[ModelView]:
    """Makes three models on g0 that contend for KV memory."""
    return [
        active(f"m{i}", "g0", waiting=2, running=1, token_rate=9.0 - i, **more) for i in range(3)
    ]


def test_a_move_for_memory_makes_no_requests_late() -> None:
    """Uses a device without KV pressure that computes most of the time."""
    gpus = [gpu("g0", capacity=60, free_bytes=10), gpu("g1")]
    contending = three(**busy(0.1))
    assert planned(contending, gpus)[0][3] == "g1"
    computes = active("c", "g1", running=1, **busy(0.85))
    assert planned([*contending, computes], gpus) == []


def test_a_move_that_takes_as_long_as_its_rates_last_gains_nothing() -> None:
    gpus = [gpu("g0", capacity=60, free_bytes=10), gpu("g1")]
    assert planned(three(load_s=44.0), gpus) == []
    assert planned(three(load_s=1.0), gpus)[0][3] == "g1"
    slow = structs.replace(NO_TRAFFIC, output_tokens=60.0)  # a minute at the pace of its SLO
    assert planned(three(traffic=slow), gpus) == []
    moving = Settings(contended_requests=2.0, min_idle_s=1.0, move_running=True)
    (action,) = prism.plan(view(three(traffic=slow), gpus), moving)
    assert action.move_running


def test_placements_without_traffic_are_those_of_algorithm_1() -> None:
    models = [model(f"m{i}", token_rate=float(i)) for i in range(6)]
    gpus = [gpu(f"g{i}") for i in range(3)]
    placed = kvpr.place(models, gpus, 0.0)
    known = [structs.replace(m, degrees=SPEED) for m in models]
    assert kvpr.place(known, gpus, 0.0).devices == placed.devices
    bins = current_bins(models, gpus)
    assert all(b.late_with(models[0]) == 0.0 for b in bins.values())
