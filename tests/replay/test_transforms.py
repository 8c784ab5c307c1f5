"""Transforms: same seed same trace, and the properties that each keeps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import TraceError
from prism_replay import transforms
from prism_replay.trace import TraceRequest
from tests.replay.records import a_request


def even(requests: int, model: str = "good") -> list[TraceRequest]:
    return [a_request(number * 0.5, model, hash_ids=(number,)) for number in range(requests)]


def test_scaling_the_rate_is_deterministic_and_seeded() -> None:
    trace = even(200)
    assert transforms.scale_rate(trace, 1.7, 3) == transforms.scale_rate(trace, 1.7, 3)
    assert transforms.scale_rate(trace, 1.7, 3) != transforms.scale_rate(trace, 1.7, 4)


@given(factor=st.floats(0.2, 5), seed=st.integers(0, 99))
def test_scaling_the_rate_keeps_order_span_and_number(factor: float, seed: int) -> None:
    trace = even(400)
    scaled = transforms.scale_rate(trace, factor, seed)
    times = [request.timestamp for request in scaled]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= trace[-1].timestamp
    assert len(scaled) == pytest.approx(factor * 400, abs=60)


def test_whole_factors_replicate_every_request_and_keep_the_originals() -> None:
    trace = even(50)
    scaled = transforms.scale_rate(trace, 3, 0, jitter_s=0.4)
    assert len(scaled) == 150
    assert all(request in scaled for request in trace)


def test_copies_share_no_prefix_with_the_originals() -> None:
    trace = [a_request(hash_ids=(0, 5)), a_request(hash_ids=(0, 6))]
    scaled = transforms.scale_rate(trace, 2, 0)
    assert Counter(request.hash_ids[0] for request in scaled) == {0: 2, 7: 2}


def test_thinning_keeps_a_subset() -> None:
    trace = even(300)
    thinned = transforms.scale_rate(trace, 0.3, 1)
    assert 50 < len(thinned) < 130
    assert set(map(id, thinned)) <= set(map(id, trace))


def test_time_scale_multiplies_arrivals_only() -> None:
    (request,) = transforms.scale_time([a_request(2.0, slo_ttft_ms=100.0)], 0.25)
    assert (request.timestamp, request.slo_ttft_ms) == (500.0, 100.0)


def test_a_window_starts_at_zero_and_leaves_its_end_out() -> None:
    cut = transforms.window(even(10), 1.0, 2.0)
    assert [request.timestamp for request in cut] == [0.0, 500.0]


def test_limit_takes_the_first() -> None:
    assert transforms.limit(even(10), 3) == even(3)


def test_map_models_needs_a_target_for_each() -> None:
    trace = [a_request(model="a"), a_request(model="b")]
    renamed = transforms.map_models(trace, {"a": "x", "b": "x"})
    assert [request.model for request in renamed] == ["x", "x"]
    with pytest.raises(TraceError, match="no target for b"):
        transforms.map_models(trace, {"a": "x"})


def test_popularity_map_cuts_ranks_into_equal_runs() -> None:
    sources = [f"s{rank}" for rank in range(27)]
    mapping = transforms.popularity_map(sources, ["w", "x", "y", "z"])
    assert Counter(mapping.values()) == {"w": 7, "x": 7, "y": 7, "z": 6}
    assert [mapping[f"s{rank}"] for rank in (0, 6, 7, 13, 14, 26)] == list("wwxxyz")
    assert transforms.popularity_map(["s"], ["w", "x"]) == {"s": "w"}
    with pytest.raises(TraceError):
        transforms.popularity_map(["s"], [])


def test_sampled_models_come_from_all_ranks_of_popularity() -> None:
    trace = [a_request(0.0, f"m{rank}") for rank in range(12) for _ in range(12 - rank)]
    for seed in range(5):
        sampled = transforms.sample_models(trace, 4, seed)
        ranks = sorted({int(request.model[1:]) for request in sampled})
        assert [rank // 3 for rank in ranks] == [0, 1, 2, 3]
        assert len(sampled) == sum(12 - rank for rank in ranks)
    assert transforms.sample_models(trace, 12) == trace


def test_only_some_models() -> None:
    trace = [a_request(model="a"), a_request(model="b")]
    assert transforms.only_models(trace, ["b"]) == trace[1:]
    with pytest.raises(TraceError, match="model 'x' is not in the trace; models: a, b"):
        transforms.only_models(trace, ["a", "x"])


def test_round_robin_deals_models_out_in_turn() -> None:
    mapping = transforms.round_robin_map(list("abcde"), ["x", "y"])
    assert mapping == {"a": "x", "b": "y", "c": "x", "d": "y", "e": "x"}


@given(
    context=st.integers(2, 3000),
    scale=st.floats(0.01, 4),
    lengths=st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
)
def test_fitted_lengths_fit_the_context(
    context: int, scale: float, lengths: tuple[int, int]
) -> None:
    request = a_request(input_length=lengths[0], output_length=lengths[1])
    (fitted,) = transforms.fit_lengths([request], transforms.LengthRule(context, scale))
    assert min(fitted.input_length, fitted.output_length) >= 1
    assert fitted.input_length + fitted.output_length <= context
    assert fitted.input_length <= max(1, round(lengths[0] * scale))


@pytest.mark.parametrize(
    "call",
    [
        lambda: transforms.scale_rate(even(3), 0),
        lambda: transforms.scale_rate(even(3), 1e-9),
        lambda: transforms.scale_rate(even(3), float("inf")),
        lambda: transforms.scale_rate(even(3), float("nan")),
        lambda: transforms.scale_rate(even(3), 1e30),
        lambda: transforms.scale_time(even(3), -1),
        lambda: transforms.scale_time(even(3), float("inf")),
        lambda: transforms.scale_time(even(3), float("nan")),
        lambda: transforms.scale_time(even(3), 1e300),
        lambda: transforms.window(even(3), 100),
        lambda: transforms.sample_models(even(3), 0),
        lambda: transforms.sample_models(even(3), 2),
        lambda: transforms.round_robin_map(["a"], []),
        lambda: transforms.fit_lengths(even(3), transforms.LengthRule(10, output_max_tokens=10)),
        lambda: transforms.fit_lengths(even(3), transforms.LengthRule(10, scale=0)),
        lambda: transforms.fit_lengths(even(3), transforms.LengthRule(10, scale=float("nan"))),
    ],
)
def test_impossible_transforms_are_named_errors(call: object) -> None:
    with pytest.raises(TraceError):
        call()  # type: ignore[operator]
