"""Choice of tensor-parallel degrees: latencies against a simulated queue, and the plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from prism.policies import latency, prism
from prism.policies.data import Activate, Degree, ModelView, Traffic
from prism.policies.planning import degrees
from tests.policies.clusters import SETTINGS, active, gpu, model, planned, view

DEGREES = {tp: Degree(40, 1, 8, 1000.0 * tp, 0.01 / tp, 0.0001 / tp) for tp in (1, 2, 4, 8)}


def traffic(rate_rps: float = 0.2, **more: Any) -> Traffic:
    plain = Traffic(
        requests=600,
        rate_rps=rate_rps,
        peak_rps=rate_rps,
        prompt_tokens=300.0,
        prompt_std_tokens=100.0,
        prompt_p99_tokens=600.0,
        output_tokens=20.0,
    )
    return structs.replace(plain, **more)


def auto(change: Any = active, **more: Any) -> ModelView:
    """Makes a model of TTFT SLO 1 s and TPOT SLO 0.1 s that may have a degree of 1 to 8."""
    args = ("g0",) if change is active else ()
    given = {"weight": 40, "floor": 8, "slo_tpot_s": 0.1, "traffic": traffic(), **more}
    return change("a", *args, degrees=DEGREES, **given)


LONG = traffic(prompt_p99_tokens=1500.0)  # needs 1.5 s at tp 1
SHORT = traffic(0.1, prompt_tokens=100.0, prompt_std_tokens=10.0, prompt_p99_tokens=120.0)


@pytest.mark.parametrize("rate_rps", [0.3, 1.0, 2.0])
def test_ttft_is_that_of_a_queue_of_prompts(rate_rps: float) -> None:
    rng = np.random.default_rng(3)
    count, mean, std = 200_000, 300.0, 300.0
    arrivals = np.cumsum(rng.exponential(1 / rate_rps, count))
    prompts = rng.gamma((mean / std) ** 2, std**2 / mean, count)
    free_s, ttft_s = 0.0, np.empty(count)
    for number, (at_s, tokens) in enumerate(zip(arrivals, prompts, strict=True)):
        free_s = max(free_s, at_s) + tokens / 1000.0
        ttft_s[number] = free_s - at_s
    seen = traffic(
        rate_rps,
        prompt_tokens=mean,
        prompt_std_tokens=std,
        prompt_p99_tokens=float(np.quantile(prompts, 0.99)),
        output_tokens=0.0,
    )
    computed_s, _ = latency.latencies(seen, DEGREES[1], 0.1, 0.0)
    assert computed_s == pytest.approx(np.quantile(ttft_s, 0.99), rel=0.25)


def test_a_full_device_has_no_latency() -> None:
    assert latency.lateness(auto(traffic=traffic(4.0)), 1, 0.0) == float("inf")
    assert latency.lateness(auto(), 1, 1.0) == float("inf")
    assert latency.lateness(auto(), 1, 0.0) < latency.lateness(auto(), 1, 0.5) < float("inf")


def test_the_least_degree_that_meets_the_slos_comes_first() -> None:
    assert degrees.higher(auto(), 0.0) == []
    assert degrees.higher(auto(traffic=LONG), 0.0) == [4, 8, 2]
    barely = traffic(prompt_p99_tokens=1100.0)
    assert degrees.higher(auto(traffic=barely), 0.0)[0] == 2
    assert degrees.higher(auto(traffic=structs.replace(LONG, requests=9)), 0.0) == []
    fixed = structs.replace(auto(traffic=LONG), degrees={1: DEGREES[1]})
    assert degrees.higher(fixed, 0.0) == []


def test_a_degree_that_was_just_raised_is_not_lowered() -> None:
    wide = auto(traffic=LONG, tp=4, peers=("g1", "g2", "g3"))
    assert degrees.lower(wide, 0.0) is None
    calm = structs.replace(wide, traffic=SHORT)
    assert degrees.lower(calm, 0.0) == 1


def test_a_model_moves_to_the_degree_before_it_leaves_its_device() -> None:
    gpus = [gpu(f"g{i}", node="n0") for i in range(5)]
    (action,) = prism.plan(view([auto(traffic=LONG)], gpus), SETTINGS)
    assert (action.source, action.target, action.peers) == ("g0", "g1", ("g2", "g3", "g4"))
    assert action.reason == "a is late; 0.11 requests/s fewer are late with tp 4"
    assert planned([auto(traffic=LONG)], gpus, rebalance=False) == []
    assert planned([auto()], gpus) == []


def test_parts_of_a_model_are_on_one_node_and_not_beside_the_old_ones() -> None:
    """Falls back to the next best degree if fewer devices have room."""
    gpus = [gpu(f"g{i}", node="n0" if i < 3 else "n1") for i in range(6)]
    assert planned([auto(traffic=LONG)], gpus) == [("migrate", "a", "g0", "g1")]
    (action,) = prism.plan(view([auto(traffic=LONG)], gpus), SETTINGS)
    assert action.peers == ("g2",)


def test_idle_models_leave_for_a_higher_degree() -> None:
    gpus = [gpu("g0"), gpu("g1"), gpu("g2", free_bytes=10)]
    idle = active("idle", "g2", weight=80, idle_s=46)
    assert planned([auto(traffic=LONG), idle], gpus) == [("evict", "idle", "g2")]
    young = structs.replace(idle, idle_s=44)
    assert planned([auto(traffic=LONG), young], gpus) == []
    low = auto(tp=2, peers=("g1",), traffic=SHORT)
    assert planned([low, idle], [*gpus[:2], gpu("g2", free_bytes=10)]) == []


def test_a_model_that_finds_no_free_memory_keeps_no_other_from_its_degree() -> None:
    """Has free engines and room by weights on each device, but KV memory is in use on n0."""
    full = [gpu(f"g{i}", node="n0", free_bytes=5) for i in range(4)]
    free = [gpu(f"f{i}", node="n1") for i in range(4)]
    later = structs.replace(LONG, prompt_p99_tokens=3000.0)
    latest = auto(traffic=later, barred=("f0", "f1", "f2", "f3"))
    other = structs.replace(auto(traffic=LONG), name="b", device="f0")
    assert planned([latest, other], [*full, *free]) == [("migrate", "b", "f0", "f1")]


def test_a_busy_neighbour_that_cannot_move_is_a_reason_for_a_higher_degree() -> None:
    gpus = [gpu(f"g{i}") for i in range(4)]
    near = traffic(prompt_p99_tokens=900.0)
    busy = active("busy", "g0", weight=1, degrees={1: DEGREES[1]}, traffic=traffic(1.5))
    assert planned([auto(traffic=near)], gpus) == []
    pinned = structs.replace(busy, pinned_device="g0")
    assert planned([auto(traffic=near), pinned], gpus)[0][:2] == ("migrate", "a")


def test_an_absent_model_is_activated_at_its_degree_or_at_the_least_one() -> None:
    asked = auto(model, traffic=LONG, waiting=1)
    gpus = [gpu(f"g{i}") for i in range(4)]
    (action,) = prism.plan(view([asked], gpus), SETTINGS)
    assert isinstance(action, Activate)
    assert len(action.peers) == 3
    (action,) = prism.plan(view([asked], gpus[:3]), SETTINGS)
    assert isinstance(action, Activate)
    assert action.peers == ()


def test_a_model_with_several_copies_keeps_its_degree() -> None:
    gpus = [gpu(f"g{i}") for i in range(6)]
    one = auto(traffic=LONG, running=1, token_rate=1.0)
    pair = [one, structs.replace(one, device="g1")]
    assert planned(pair, gpus) == []
