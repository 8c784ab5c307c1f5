"""Algorithm 1: candidates, ties, threshold, packing by size, honest refusals, the KVPR bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, need_bytes, weight_of
from prism.policies.data import GpuView, ModelView
from tests.policies.clusters import active, clusters, gpu, model


def placed(models: list[ModelView], gpus: list[GpuView], tau: float = 0.0) -> dict[str, str]:
    """Returns model -> device. REQUIRES: all models have tp 1."""
    return {name: home for name, (home,) in kvpr.place(models, gpus, tau).devices.items()}


def test_weight_is_rate_times_token_bytes_over_tpot_slo() -> None:
    assert weight_of(model("a", token_rate=3.0, token_bytes=8, slo_tpot_s=0.5)) == 48.0


def test_kvpr_is_pressure_over_memory_left_after_weights() -> None:
    b = Bin(gpu("g", 100, fixed_bytes=20), engines=4)
    b.put(model("a", weight=30, floor=10, token_rate=5.0))
    assert b.kvpr == pytest.approx(5.0 / 50)
    assert (b.shared_kv_bytes, b.room_bytes, b.free_engines) == (50, 40, 3)
    assert b.kvpr_with(model("b", weight=50, token_rate=1.0)) == math.inf
    assert b.kvpr_without(["a"]) == 0.0


def test_without_rates_models_spread_by_memory() -> None:
    models = [model(name, weight) for name, weight in zip("abcd", (40, 30, 20, 10), strict=True)]
    assert placed(models, [gpu("g0"), gpu("g1")]) == {"a": "g0", "b": "g1", "c": "g1", "d": "g0"}


def test_hot_models_go_apart_and_cold_ones_to_the_least_pressed() -> None:
    models = [model("cold"), model("hot", token_rate=9.0), model("warm", token_rate=4.0)]
    gpus = [gpu("g0"), gpu("g1")]
    assert placed(models, gpus) == {"hot": "g0", "warm": "g1", "cold": "g1"}


def test_a_full_device_is_no_candidate() -> None:
    models = [model("big", 90, token_rate=1.0), model("next", 50, token_rate=0.5)]
    assert placed(models, [gpu("g0"), gpu("g1", 60)])["next"] == "g1"


def test_kv_floor_counts_but_is_part_of_shared_kv() -> None:
    placement = kvpr.place([model("a", 60, 30, token_rate=4.0), model("b", 5, 6)], [gpu("g")], 0.0)
    assert placement.kvpr == {"g": pytest.approx(4.0 / 40)}
    assert placement.devices == {"a": ("g",)}
    assert "1 bytes" in placement.refused["b"]


def test_a_device_without_free_engine_is_no_candidate() -> None:
    gpus = [gpu("g0", 1000, engines_free=1), gpu("g1", 50, engines_free=1)]
    placement = kvpr.place([model("a"), model("b"), model("c")], gpus, 0.0)
    assert placement.devices == {"a": ("g0",), "b": ("g1",)}
    assert placement.refused["c"].startswith("no engine is free on")


@pytest.mark.parametrize(("tau", "home"), [(0.0, "g1"), (0.4, "g1"), (0.6, "g0")])
def test_a_model_stays_unless_the_gain_exceeds_tau(tau: float, home: str) -> None:
    hot = active("hot", "g0", token_rate=8.0, pinned_device="g0")
    warm = active("warm", "g1", token_rate=4.0, pinned_device="g1")
    assert (
        placed([hot, warm, active("x", "g0", token_rate=1.0)], [gpu("g0"), gpu("g1")], tau)["x"]
        == home
    )


def test_equal_pressure_never_moves_a_model() -> None:
    models = [active("a", "g1"), active("b", "g1", token_rate=3.0)]
    assert placed(models, [gpu("g0"), gpu("g1")])["b"] == "g1"


def test_pinned_models_take_their_room_first() -> None:
    models = [model("hot", 60, token_rate=9.0), model("pinned", 60, pinned_device="g0")]
    assert placed(models, [gpu("g0"), gpu("g1")]) == {"pinned": "g0", "hot": "g1"}


def test_a_barred_or_dead_device_is_no_candidate() -> None:
    gpus = [gpu("g0"), gpu("g1", alive=False), gpu("g2", 40)]
    assert placed([model("a", barred=("g0",))], gpus) == {"a": "g2"}
    refused = kvpr.place([model("a", barred=("g0", "g2"))], gpus, 0.0).refused
    assert refused["a"] == "its activation failed recently on g0, g2"


def test_what_pressure_cannot_fit_is_packed_by_size() -> None:
    # By pressure the two small ones go to different devices and the large one fits nowhere.
    models = [
        model("s1", 30, 0, token_rate=9.0),
        model("s2", 30, 0, token_rate=8.0),
        model("large", 80, 0, token_rate=1.0),
    ]
    placement = kvpr.place(models, [gpu("g0"), gpu("g1")], 0.0)
    assert not placement.refused
    assert placement.devices["s1"] == placement.devices["s2"] != placement.devices["large"]


def test_refusal_names_the_bytes_and_the_closest_device() -> None:
    placement = kvpr.place([model("a", 200, 5)], [gpu("g0", 100), gpu("g1", 150)], 0.0)
    assert placement.refused["a"].startswith("55 bytes (0.0 MiB) are missing on g1")


def test_refusal_of_a_pin_to_an_unknown_or_dead_device() -> None:
    gpus = [gpu("g0"), gpu("g1", alive=False)]
    models = [model("a", pinned_device="g9"), model("b", pinned_device="g1")]
    refused = kvpr.place(models, gpus, 0.0).refused
    assert refused["a"] == "its device g9 is not in the cluster"
    assert refused["b"] == "no agent answers on g1"


@given(clusters(), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_placement_properties(view, tau) -> None:
    """Checks capacity, engines, pins, completeness, and independence of the order of devices."""
    placement = kvpr.place(view.models, view.gpus, tau)
    assert set(placement.devices) | set(placement.refused) == {m.name for m in view.models}
    assert not set(placement.devices) & set(placement.refused)
    for g in view.gpus:
        here = [m for m in view.models if placement.devices.get(m.name) == (g.name,)]
        assert sum(map(need_bytes, here)) <= g.capacity_bytes - g.fixed_bytes
        assert len(here) <= g.engines_free + sum(m.device == g.name for m in view.models)
        assert all(m.pinned_device in (None, g.name) for m in here)
    assert kvpr.place(view.models, view.gpus[::-1], tau) == placement


# --- Appendix A.1 --------------------------------------------------------------------------


def exact_kvpr(models: list[ModelView], homes: tuple[int, ...], gpus: list[GpuView]) -> Fraction:
    """Returns the largest KVPR of an assignment, in exact arithmetic."""
    worst = Fraction(0)
    for i, g in enumerate(gpus):
        here = [m for m, home in zip(models, homes, strict=True) if home == i]
        pressure = sum((Fraction(weight_of(m)) for m in here), Fraction(0))
        worst = max(worst, pressure / (g.capacity_bytes - sum(m.weight_bytes for m in here)))
    return worst


def instances() -> Iterator[tuple[list[ModelView], list[GpuView]]]:
    """Yields all multisets of up to 4 models of 3 rates x 3 sizes, on 2 and 3 devices.

    All models fit on one device, as the bound requires.
    """
    kinds = list(itertools.product((1.0, 4.0, 10.0), (2, 10, 24)))
    for count in range(1, 5):
        for picks in itertools.combinations_with_replacement(kinds, count):
            models = [model(f"m{i}", size, 0, token_rate=r) for i, (r, size) in enumerate(picks)]
            for capacities in ((100, 100), (100, 140), (100, 100, 120)):
                yield models, [gpu(f"g{i}", capacity) for i, capacity in enumerate(capacities)]


def test_the_bound_of_the_appendix_on_all_small_instances() -> None:
    """Checks max KVPR <= optimum x (1 + C / (S - m)).

    m and S belong to the last model placed on the device with the largest KVPR.
    """
    checked, above_optimum = 0, 0
    for models, gpus in instances():
        homes = placed(models, gpus)
        index = tuple(int(homes[m.name][1:]) for m in models)
        worst = exact_kvpr(models, index, gpus)
        choices = itertools.product(range(len(gpus)), repeat=len(models))
        optimum = min(exact_kvpr(models, choice, gpus) for choice in choices)
        by_kvpr = [(exact_kvpr_of(models, index, gpus, i), i) for i in range(len(gpus))]
        bottleneck = max(by_kvpr)[1]
        here = [m for m, i in zip(models, index, strict=True) if i == bottleneck]
        left = gpus[bottleneck].capacity_bytes - sum(m.weight_bytes for m in here)
        largest = max(g.capacity_bytes for g in gpus)
        assert worst <= optimum * (1 + Fraction(largest, left)), (models, gpus)
        checked += 1
        above_optimum += worst > optimum
    assert checked == 3 * 714
    assert 0 < above_optimum < checked  # the greedy is not optimal, so the bound has work to do


def exact_kvpr_of(
    models: list[ModelView], homes: tuple[int, ...], gpus: list[GpuView], i: int
) -> Fraction:
    only = [
        structs.replace(m, token_rate=m.token_rate if h == i else 0.0)
        for m, h in zip(models, homes, strict=True)
    ]
    return exact_kvpr(only, homes, gpus)
