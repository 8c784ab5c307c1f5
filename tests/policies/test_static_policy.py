"""The static policy: a fixed partition that load never changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec import structs

from prism.policies.bins import part
from prism.policies.data import NO_TRAFFIC, Activate, Refuse, Settings, Traffic
from prism.policies.static import StaticSettings, partition, plan
from tests.policies.clusters import active, clusters, gpu, model, view


def expected(rate: float) -> Traffic:
    """Returns traffic of `rate` tokens per second."""
    return Traffic(mean_rps=rate / 4, prompt_tokens=3.0, output_tokens=1.0)


def test_equal_split_of_what_weights_leave() -> None:
    models = [model("a", 10, wanted=True), model("b", 30, wanted=True)]
    actions = plan(view(models, [gpu("g0")]), Settings())
    assert [(a.model, a.device, a.kv_limit_bytes) for a in actions] == [
        ("b", "g0", 30),
        ("a", "g0", 30),
    ]


def test_static_share_and_the_rest_in_equal_parts() -> None:
    models = [model("a", static_share=0.5), model("b"), model("c")]
    assert partition(models, [gpu("g0", 110)]).limits_bytes == {"a": 40, "b": 20, "c": 20}


def test_or_with_room_for_as_many_tokens() -> None:
    wide = model("wide", 10, token_bytes=3, static_share=None)
    models = [wide, model("a", 10, token_bytes=1), model("given", 10, static_share=0.5)]
    found = partition(models, [gpu("g0", 110)], StaticSettings("tokens"))
    assert found.limits_bytes == {"given": 40, "wide": 30, "a": 10}


def test_or_by_expected_rates_above_the_floors() -> None:
    models = [
        model("busy", 10, 5, expected=expected(3.0)),
        model("calm", 10, 5, expected=expected(1.0)),
        model("idle", 10, 10),
        model("given", 10, static_share=0.25),
    ]
    by_rates = StaticSettings("rates")
    found = partition(models, [gpu("g0", 140)], by_rates)
    assert found.limits_bytes == {"busy": 46, "calm": 18, "idle": 10, "given": 25}
    unknown = [structs.replace(m, expected=NO_TRAFFIC) for m in models]
    found = partition(unknown, [gpu("g0", 140)], by_rates)
    assert found.limits_bytes == {"busy": 23, "calm": 23, "idle": 28, "given": 25}
    full = [model("a", static_share=0.9), model("b", 10, 20, expected=expected(1.0))]
    assert set(partition(full, [gpu("g0", 120)], by_rates).refused) == {"b"}


def test_pins_are_honoured_and_the_rest_spread_by_size() -> None:
    models = [model("a", 40, pinned_device="g1"), model("b", 30), model("c", 10), model("d", 5)]
    assert partition(models, [gpu("g0"), gpu("g1")]).devices == {
        "a": ("g1",),
        "b": ("g0",),
        "c": ("g0",),
        "d": ("g1",),
    }


def test_a_share_below_the_floor_is_refused_with_the_bytes_missing() -> None:
    models = [model("a", 10, 20, static_share=0.1, wanted=True), model("b", wanted=True)]
    actions = plan(view(models, [gpu("g0", 120)]), Settings())
    refusal = next(a for a in actions if a.model == "a")
    assert isinstance(refusal, Refuse)
    assert "10 bytes less" in refusal.reason
    assert isinstance(next(a for a in actions if a.model == "b"), Activate)


def test_shares_over_one_are_refused() -> None:
    models = [model("a", static_share=0.7), model("b", static_share=0.6)]
    refused = partition(models, [gpu("g0")]).refused
    assert set(refused) == {"a", "b"}
    assert "add up to 1.30" in refused["a"]


def test_a_model_that_fits_nowhere_is_refused() -> None:
    (refusal,) = plan(view([model("a", 200, waiting=1)], [gpu("g0")]), Settings())
    assert isinstance(refusal, Refuse)
    assert refusal.reason.startswith("101 bytes")


def test_nothing_is_evicted_or_moved() -> None:
    models = [
        active("old", "g0", weight=80, idle_s=1e9),
        active("hot", "g0", weight=10, token_rate=100.0, waiting=5),
        model("a", 50, waiting=1),
    ]
    (refusal,) = plan(view(models, [gpu("g0", free_bytes=0)]), Settings())
    assert isinstance(refusal, Refuse)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"engines_free": 0}, "no engine"), ({"alive": False}, "no engine")],
)
def test_a_device_that_cannot_take_its_model_now_keeps_it(change, word) -> None:
    gpus = [structs.replace(gpu("g0", 200), **change), gpu("g1", 100)]
    (refusal,) = plan(view([model("a", waiting=1)], gpus), Settings())
    assert isinstance(refusal, Refuse)
    assert word in refusal.reason


def test_a_failed_activation_is_not_repeated_at_once() -> None:
    (refusal,) = plan(view([model("a", waiting=1, barred=("g0",))], [gpu("g0")]), Settings())
    assert refusal == Refuse("a", "its activation failed recently on g0")


def test_tensor_parallel_models_get_a_share_on_each_device() -> None:
    models = [model("a", 60, 10, tp=2, wanted=True), model("b", 20, 10, wanted=True)]
    gpus = [gpu("g0"), gpu("g1")]
    assert plan(view(models, gpus), Settings()) == (
        Activate("a", "g0", "static partition: 0.0 MiB of KV memory on g0", 25, ("g1",)),
        Activate("b", "g0", "static partition: 0.0 MiB of KV memory on g0", 25),
    )
    (refusal,) = plan(view([model("a", 60, tp=2, wanted=True)], gpus[:1]), Settings())
    assert isinstance(refusal, Refuse)


@given(clusters(wide=True))
@settings(max_examples=100, deadline=None)
def test_the_partition_ignores_everything_that_changes(view) -> None:
    calm = [
        structs.replace(
            m,
            device=None,
            peers=(),
            state="absent",
            token_rate=0.0,
            waiting=0,
            idle_s=0.0,
            barred=(),
        )
        for m in view.models
    ]
    gpus = [structs.replace(g, engines_free=g.engines_total, alive=True) for g in view.gpus]
    division = partition(view.models, view.gpus)
    assert division == partition(calm, gpus)
    for g in view.gpus:
        here = [part(m) for m in view.models if g.name in division.devices.get(m.name, ())]
        limits = sum(division.limits_bytes[m.name] for m in here)
        assert limits + sum(m.weight_bytes for m in here) <= g.capacity_bytes
        assert all(division.limits_bytes[m.name] >= m.kv_floor_bytes for m in here)


def test_equal_models_are_spread_by_their_expected_rates() -> None:
    rates = {"a": 9.0, "b": 8.0, "c": 1.0, "d": 2.0}
    models = [model(name, expected=expected(rate)) for name, rate in rates.items()]
    homes = partition(models, [gpu("g0"), gpu("g1")]).devices
    assert homes == {"a": ("g0",), "b": ("g1",), "c": ("g0",), "d": ("g1",)}


def test_models_without_rates_are_placed_in_the_order_of_the_configuration() -> None:
    models = [model(name, wanted=True) for name in ("z", "y", "x", "a")]
    actions = plan(view(models, [gpu("g0"), gpu("g1")]), Settings())
    assert [(a.model, a.device) for a in actions] == [
        ("z", "g0"),
        ("y", "g1"),
        ("x", "g0"),
        ("a", "g1"),
    ]
