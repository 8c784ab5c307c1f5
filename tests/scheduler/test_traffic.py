"""Rates and lengths of requests over a sliding window, against numpy on the same requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from prism.policies.data import NO_TRAFFIC, Traffic
from prism.scheduler.traffic import (
    IDLE_TIMES,
    SLOT_S,
    SLOTS,
    ModelTraffic,
    TrafficBook,
    bucket,
    length,
    share_of,
)


@given(st.integers(1, 10**6))
def test_a_length_is_known_within_nine_percent(tokens: int) -> None:
    assert length(bucket(tokens)) == pytest.approx(tokens, rel=0.0906)


def test_lengths_and_rates_are_those_of_the_requests() -> None:
    rng = np.random.default_rng(1)
    prompts = np.maximum(1, rng.lognormal(6, 1.2, 3000).astype(int))
    traffic = ModelTraffic()
    for number, tokens in enumerate(prompts):
        traffic.arrived(int(tokens), number * 0.1)
        traffic.ended(50 if number % 2 else 150, number * 0.1)
    seen = traffic.seen(300.0)
    assert seen.requests == 3000
    assert seen.rate_rps == pytest.approx(10.0)
    assert seen.peak_rps == pytest.approx(10.0)
    assert seen.prompt_tokens == pytest.approx(prompts.mean(), rel=0.05)
    assert seen.prompt_std_tokens == pytest.approx(prompts.std(), rel=0.1)
    assert seen.prompt_p99_tokens == pytest.approx(np.quantile(prompts, 0.99), rel=0.15)
    assert seen.output_tokens == pytest.approx(100, rel=0.1)
    assert seen.output_std_tokens == pytest.approx(50, rel=0.2)


def test_the_rate_is_of_the_last_minute_and_the_peak_of_ten_minutes() -> None:
    traffic = ModelTraffic()
    for number in range(100):
        traffic.arrived(10, number * 0.1)  # all in the first slot
    assert traffic.seen(5.0) == NO_TRAFFIC
    assert traffic.seen(SLOT_S).rate_rps == pytest.approx(10.0)
    later = traffic.seen(100.0)
    assert (later.rate_rps, later.peak_rps) == (0.0, pytest.approx(10.0))
    assert traffic.seen((SLOTS + 1) * SLOT_S) == NO_TRAFFIC


def test_the_busy_part_is_that_of_the_slots_with_arrivals() -> None:
    traffic = ModelTraffic()
    for slot in (0, 1, 3):
        for number in range(5):
            traffic.arrived(10, slot * SLOT_S + number)
    seen = traffic.seen(8 * SLOT_S)
    assert seen.busy_part == pytest.approx(3 / 8)
    assert seen.mean_rps == pytest.approx(15 / (8 * SLOT_S))
    new = ModelTraffic()
    new.arrived(10, 1.0)
    assert new.seen(SLOT_S).busy_part < 0.2


def test_idle_times_are_those_between_slots_with_arrivals() -> None:
    traffic = ModelTraffic()
    for slot in (0, 1, 4, 5, 105):
        traffic.arrived(10, slot * SLOT_S + 1)
    traffic.ended(10, 60 * SLOT_S)  # the end of a request does not end an idle time
    assert traffic.seen(105 * SLOT_S).idle_times_s == (20.0,)
    assert traffic.seen(106 * SLOT_S).idle_times_s == (20.0, 990.0)


def test_idle_times_outlast_the_requests_and_are_bounded() -> None:
    traffic = ModelTraffic()
    for number in range(IDLE_TIMES + 5):
        traffic.arrived(10, 3 * number * SLOT_S)
    later = traffic.seen((3 * IDLE_TIMES + 5 * SLOTS) * SLOT_S)
    assert later == Traffic(idle_times_s=(20.0,) * IDLE_TIMES)


def test_rates_are_those_since_the_first_report_on_any_clock() -> None:
    book, begin_s = TrafficBook(), 1e6
    for second in range(61):
        book.arrived({"f0": {"a": {bucket(10): 10 * second}}}, begin_s + second)
    seen = book.of("a", begin_s + 65)
    assert seen.mean_rps == pytest.approx(10, rel=0.2)
    assert seen.busy_part > 0.9


def test_lengths_of_outputs_are_kept_while_requests_are_rejected() -> None:
    traffic = ModelTraffic()
    traffic.arrived(10, 1.0)
    traffic.ended(70, 1.0)
    assert traffic.seen(SLOT_S).output_tokens == 70
    traffic.arrived(10, 700.0)
    assert traffic.seen(800.0).output_tokens == 70


def test_the_result_changes_once_in_a_slot() -> None:
    """Lets views be reused while nothing changes."""
    traffic = ModelTraffic()
    traffic.arrived(10, 1.0)
    seen = traffic.seen(SLOT_S)
    traffic.arrived(10, SLOT_S + 1.0)
    assert traffic.seen(SLOT_S + 2.0) is seen
    assert traffic.seen(2 * SLOT_S).requests == 2


def test_counters_by_bucket_equal_single_requests() -> None:
    one, other = ModelTraffic(), ModelTraffic()
    for tokens in (10, 10, 500):
        one.arrived(tokens, 1.0)
    one.ended(7, 1.0)
    other.grew({bucket(10): 2, bucket(500): 1}, {bucket(7): 1}, 1.0)
    single, counted = structs.asdict(one.seen(SLOT_S)), structs.asdict(other.seen(SLOT_S))
    assert counted.pop("idle_times_s") == single.pop("idle_times_s")
    assert counted == pytest.approx(single, rel=0.1)


def test_copies_share_the_rates_evenly() -> None:
    traffic = ModelTraffic()
    traffic.arrived(10, 1.0)
    seen = traffic.seen(SLOT_S)
    assert share_of(seen, 1) is seen
    assert share_of(seen, 2).peak_rps == seen.peak_rps / 2
    assert share_of(seen, 2).prompt_p99_tokens == seen.prompt_p99_tokens


def outputs(book: TrafficBook, model: str) -> int:
    """Returns the number of outputs, which all have 100 tokens."""
    book.arrived({"f0": {}}, 1.0)
    book.arrived({"f0": {model: {0: 1}}}, 1.0)  # there must be an arrival
    lengths = book._models[model]._open.outputs
    assert lengths.count == lengths.buckets[bucket(100)]
    return lengths.count


def test_reports_are_counters_that_may_restart() -> None:
    """Has two devices, the second of which restarts after three requests."""
    book, tokens = TrafficBook(), bucket(100)
    for device, seen in (("g0", (5, 7)), ("g1", (1, 4, 2))):
        for number in seen:
            book.ended(device, {"a": {tokens: number}}, 1.0)
    assert outputs(book, "a") == (7 - 5) + (4 - 1) + 2
    assert book.of("b", SLOT_S) == NO_TRAFFIC


def test_a_model_that_a_report_leaves_out_keeps_its_counters() -> None:
    book, tokens = TrafficBook(), bucket(100)
    for counters in ({"a": {tokens: 5}}, {}, {"a": {tokens: 6}}):
        book.ended("g0", counters, 1.0)
    assert outputs(book, "a") == 1


def test_arrivals_are_those_of_all_frontends() -> None:
    """Has a frontend that starts later, an older heartbeat after a newer one, and a frontend whose
    heartbeat stops for a while: none counts anything twice."""
    book, short, long = TrafficBook(), bucket(10), bucket(1000)
    for beats in (
        {"f0": {"a": {short: 5}}},
        {"f0": {"a": {short: 7, long: 1}, "b": {long: 2}}},
        {"f0": {"a": {short: 6}}},
        {"f0": {"a": {short: 8, long: 1}}, "f1": {"a": {short: 100}}},
        {"f0": {"a": {short: 8, long: 1}, "b": {long: 2}}, "f1": {"a": {short: 101}}},
        {"f1": {"a": {short: 101}}},
        {"f0": {"a": {short: 50}}, "f1": {"a": {short: 101}}},
        {"f0": {"a": {short: 51}}, "f1": {"a": {short: 101}}},
    ):
        book.arrived(beats, 1.0)
    assert book.of("a", SLOT_S).requests == (8 - 5) + 1 + 1 + 1
    assert book.of("b", SLOT_S).requests == 2
    assert book.of("b", SLOT_S).prompt_tokens == pytest.approx(1000, rel=0.1)
