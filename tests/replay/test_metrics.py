"""Percentiles against numpy, attainment on values worked out by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_replay import metrics
from prism_replay.report.page import milliseconds, percent
from prism_replay.results import (
    METRICS,
    Attainment,
    Counters,
    GroupSummary,
    Latency,
    ReplayResults,
    RequestRecord,
    RunConfig,
    Throughput,
    read_results,
    scale_key,
    write_results,
)
from tests.replay.records import a_record

Values = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def judged(records: list[RequestRecord], scale: float) -> Attainment:
    return metrics.attainment(metrics.columns(records, ["good"], {}), scale)


@given(Values)
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    found = metrics.latency(values)
    ordered = sorted(values)
    assert found.mean == pytest.approx(math.fsum(values) / len(values))
    for q, value in ((50, found.p50), (95, found.p95), (99, found.p99)):
        assert value == pytest.approx(float(np.percentile(ordered, q, method="linear")))
        # and by definition: linear between the order statistics around rank q (n - 1)
        rank = q / 100 * (len(ordered) - 1)
        low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        assert value == pytest.approx(low + (high - low) * (rank - math.floor(rank)))


def test_percentiles_on_known_values() -> None:
    found = metrics.latency([10.0, 20.0, 30.0, 40.0, 50.0])
    assert found == Latency(30.0, 30.0, 48.0, pytest.approx(49.6))
    assert metrics.latency([]) == Latency()


@pytest.mark.parametrize(
    ("fields", "scale", "meets"),
    [
        ({"ttft_ms": 100.0}, 1.0, (True, True, True, True)),
        ({"ttft_ms": 100.1}, 1.0, (False, True, True, False)),
        ({"ttft_ms": 100.1}, 2.0, (True, True, True, True)),
        ({"tpot_ms": 10.1}, 0.5, (False, False, False, False)),
        ({"tpot_ms": None, "output_tokens": 1}, 1.0, (True, True, True, True)),
        ({"error": "timeout"}, 9.0, (False, False, False, False)),
        ({"slo_tpot_ms": None, "tpot_ms": 900.0}, 1.0, (True, None, True, True)),
        ({"ttft_ms": None, "e2e_ms": None}, 1.0, (False, True, False, False)),
    ],
)
def test_which_slos_a_request_meets(
    fields: dict[str, object], scale: float, meets: tuple[bool | None, ...]
) -> None:
    found = judged([a_record(**fields)], scale)
    assert (found.ttft, found.tpot, found.e2e, found.all) == meets


def test_attainment_counts_failures_but_not_interrupted_requests() -> None:
    records = [
        a_record(0),
        a_record(1, ttft_ms=150.0),
        a_record(2, error="http_503"),
        a_record(3, error="interrupted"),
        a_record(4, slo_ttft_ms=None, slo_tpot_ms=None, slo_e2e_ms=None),
    ]
    found = judged(records, 1.0)
    assert found.judged == 4
    assert (found.ttft, found.tpot, found.all) == (
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    )
    assert judged(records[4:], 1.0).all is None


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=30))
def test_attainment_never_falls_with_the_scale(ttfts: list[float]) -> None:
    records = [a_record(i, ttft_ms=ttft, e2e_ms=ttft + 80) for i, ttft in enumerate(ttfts)]
    parts = [judged(records, scale).all or 0.0 for scale in (0.5, 1, 2, 10)]
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_the_summary_counts_tokens_errors_and_rates() -> None:
    records = [
        a_record(0, "a", output_tokens=6),
        a_record(1, "b", output_tokens=4, input_tokens=30),
        a_record(2, "a", output_tokens=2, error="engine_died", ttft_ms=9.0),
    ]
    summary = metrics.summarize(records, [0.5, 1.0], 2.0, Counters(maps=10, unmaps=5))
    assert list(summary.models) == ["a", "b"]
    total = summary.total
    assert (total.requests, total.completed, total.errors) == (3, 2, {"engine_died": 1})
    # tokens of failed requests were generated too; their latency is not a finished request's
    assert (total.input_tokens, total.output_tokens) == (40, 12)
    assert total.ttft_ms.mean == 100.0
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (1.0, 6.0)
    assert (summary.maps_per_minute, summary.unmaps_per_minute) == (300.0, 150.0)
    assert list(total.attainment) == ["0.5", "1"]
    assert total.attainment["0.5"].all == 0.0
    assert summary.models["b"].attainment["1"].all == 1.0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), min_size=1, max_size=12))
def test_a_second_is_active_if_a_request_is_open_in_it(spans: list[tuple[int, int]]) -> None:
    records = [
        a_record(i, arrival_s=float(start), error="timeout", failed_ms=1000.0 * length)
        if length % 2
        else a_record(i, arrival_s=float(start), e2e_ms=1000.0 * length)
        for i, (start, length) in enumerate(spans)
    ]
    seconds = {s for start, length in spans for s in range(start, start + length)}
    found = metrics.active_s(metrics.columns(records, ["good"], {}))
    assert found == pytest.approx(len(seconds))


def test_throughput_with_idle_time_and_without() -> None:
    """Has requests of two models in 3 and 2 of 20 s, and of both in one."""
    records = [
        a_record(0, "a", arrival_s=2.0, e2e_ms=2000.0, output_tokens=8),
        a_record(1, "a", arrival_s=3.0, e2e_ms=2000.0, output_tokens=4),
        a_record(2, "b", arrival_s=4.0, error="engine_died", failed_ms=2000.0, output_tokens=3),
    ]
    summary = metrics.summarize(records, [1.0], 20.0, None)
    a, b = (summary.models[name].throughput for name in "ab")
    assert a == Throughput(0.1, 0.6, 3.0, pytest.approx(2 / 3), 4.0)
    assert b == Throughput(0.0, 0.15, 2.0, 0.0, 1.5)
    assert summary.total.throughput == Throughput(0.1, 0.75, 4.0, 0.5, 3.75)
    assert metrics.summarize([], [1.0], 1.0, None).total.throughput.requests_per_active_s is None


def test_normalised_latency_is_equation_1_of_seallm() -> None:
    """Divides by each service's mean execution time, and leaves out failed requests."""
    records = [
        a_record(0, "short", e2e_ms=300.0),
        a_record(1, "short", e2e_ms=100.0),
        a_record(2, "long", e2e_ms=4000.0),
        a_record(3, "long", error="timeout", e2e_ms=None),
    ]
    alone_ms = {"short": 100.0, "long": 2000.0}
    summary = metrics.summarize(records, [1.0], 9.0, None, alone_ms)
    assert summary.models["short"].normalized_latency == pytest.approx(2.0)
    assert summary.models["long"].normalized_latency == pytest.approx(2.0)
    expected = (300 / 100 + 100 / 100 + 4000 / 2000) / 3
    assert summary.total.normalized_latency == pytest.approx(expected)
    assert metrics.summarize(records, [1.0], 9.0, None).total.normalized_latency is None


def test_the_document_has_every_metric_under_its_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "prism-replay.md").read_text()
    table = text.partition("## Metrics")[2].partition("## Base SLOs")[0]
    heads = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    counts = {"requests", "completed", "errors", "input_tokens", "output_tokens", "throughput"}
    expected = {*GroupSummary.__struct_fields__, *Throughput.__struct_fields__} - counts
    assert {name for head in heads for name in re.findall(r"`(\w+)`", head)} == {
        *expected,
        *METRICS,
        "all",
    }


def test_shown_numbers() -> None:
    assert [percent(v) for v in (None, 0.0, 0.0001, 0.5, 0.9999, 1.0)] == [
        "-",
        "0.0 %",
        "0.1 %",
        "50.0 %",
        "99.9 %",
        "100.0 %",
    ]
    assert [milliseconds(v) for v in (None, 12.4, 999.0, 1250.0)] == [
        "-",
        "12 ms",
        "999 ms",
        "1.25 s",
    ]
    assert [scale_key(v) for v in (0.5, 1.0, 20)] == ["0.5", "1", "20"]


def test_results_read_back_equal(tmp_path: Path) -> None:
    records = [a_record(0), a_record(1, error="timeout", ttft_ms=None)]
    summary = metrics.summarize(records, [1.0], 2.0, None)
    config = RunConfig(trace="t", url="u", requests=2)
    results = ReplayResults(config, records, [], None, summary)
    write_results(tmp_path / "deep" / "r.json", results)
    assert read_results(tmp_path / "deep" / "r.json") == results


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "x"}', "\xff"])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        read_results(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path / "none.json")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    config = RunConfig(trace="t", url="u", requests=0)
    summary = metrics.summarize([], [1.0], 1.0, None)
    results = ReplayResults(config, [], [], None, summary, schema="other/9")
    write_results(tmp_path / "r.json", results)
    with pytest.raises(ConfigError, match="schema 'other/9'"):
        read_results(tmp_path / "r.json")
