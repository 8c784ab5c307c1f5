"""Replays against a real HTTP server with scripted delays and faults."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from prism.errors import ConfigError
from prism_replay.live.client import Endpoint, parse_status_url
from prism_replay.live.runner import run_replay
from prism_replay.results import ReplayResults, RequestRecord, RunConfig
from prism_replay.trace import Trace, TraceRequest
from tests.replay.records import a_request
from tests.replay.scripted_server import SLOW_STEP_S, ScriptedServer, running


class Seen:
    def __init__(self) -> None:
        self.sent_requests: list[TraceRequest] = []
        self.records: list[RequestRecord] = []

    def sent(self, request: TraceRequest) -> None:
        self.sent_requests.append(request)

    def done(self, record: RequestRecord) -> None:
        self.records.append(record)


def replay(server: ScriptedServer, trace: Trace, key: str = "", **fields: Any) -> ReplayResults:
    config = RunConfig(trace="test", url=server.url, requests=len(trace), **fields)
    return asyncio.run(run_replay(trace, config, Seen(), Endpoint(server.url, key)))


def test_each_request_is_sent_whole_and_its_answer_measured(server: ScriptedServer) -> None:
    trace = [
        a_request(0.0, slo_ttft_ms=60_000.0, slo_tpot_ms=60_000.0, slo_e2e_ms=60_000.0),
        a_request(0.05, "slow", input_length=33, output_length=7),
        a_request(0.1, prompt="Hello"),
    ]
    results = replay(server, trace)
    first, second, third = server.requests
    assert (first["model"], first["max_tokens"], first["slo_ttft_ms"]) == ("good", 5, 60_000.0)
    assert (first["temperature"], first["ignore_eos"], first["stream"]) == (0, True, True)
    assert len(second["prompt"]) == 33
    assert "slo_ttft_ms" not in second
    assert third["prompt"] == "Hello"
    assert [record.index for record in results.records] == [0, 1, 2]
    assert [record.output_tokens for record in results.records] == [5, 7, 5]
    assert results.summary.total.errors == {}
    assert results.summary.total.attainment["1"].all == 1.0


def test_times_are_those_of_the_stream(server: ScriptedServer) -> None:
    (record,) = replay(server, [a_request(0.0, "slow", output_length=6)]).records
    step_ms = SLOW_STEP_S * 1000
    assert record.ttft_ms is not None
    assert record.tpot_ms is not None
    assert record.e2e_ms is not None
    # lower bounds hold on a busy machine as well: the server sleeps at least this long
    assert record.ttft_ms >= step_ms
    assert record.e2e_ms >= 6 * step_ms
    assert record.e2e_ms == pytest.approx(record.ttft_ms + 5 * record.tpot_ms, abs=0.1)


def test_arrivals_do_not_wait_for_answers(server: ScriptedServer) -> None:
    trace = [a_request(0.01 * number, "slow", output_length=10) for number in range(8)]
    results = replay(server, trace)
    assert server.in_flight_most == 8
    assert all(record.ok for record in results.records)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("refused", "unavailable", "no room"),
        ("broken", "truncated", "finish reason"),
        ("short", "short", "4 of 5 tokens"),
        ("dying", "engine_died", "killed"),
        ("garbage", "bad_answer", "not in OpenAI's stream format"),
        ("stuck", "timeout", "0.3 s"),
    ],
)
def test_failed_requests_are_named_and_miss_their_slos(
    server: ScriptedServer, model: str, error: str, says: str
) -> None:
    trace = [a_request(0.0, model, slo_ttft_ms=60_000.0), a_request(0.0, slo_ttft_ms=60_000.0)]
    results = replay(server, trace, timeout_s=0.3 if model == "stuck" else 30.0)
    failed, good = results.records
    assert (failed.error, good.error) == (error, None)
    assert says in failed.message
    assert failed.failed_ms is not None
    assert failed.failed_ms >= (300 if model == "stuck" else 0)
    assert good.failed_ms is None
    assert results.summary.total.throughput.active_s == pytest.approx(
        max(failed.failed_ms, good.e2e_ms or 0.0) / 1000
    )
    assert results.summary.total.attainment["1"].ttft == 0.5


def test_a_server_that_goes_away_is_a_connection_error(server: ScriptedServer) -> None:
    async def cut_off() -> ReplayResults:
        trace = [a_request(0.0), a_request(1.0)]
        config = RunConfig(trace="test", url=server.url, requests=2)
        task = asyncio.create_task(run_replay(trace, config, seen))
        while not seen.records:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.stop)
        return await task

    seen = Seen()
    results = asyncio.run(cut_off())
    assert [record.error for record in results.records] == [None, "connection"]


def test_servers_without_token_ids_are_counted_by_usage(server: ScriptedServer) -> None:
    (record,) = replay(server, [a_request(0.0, "textual", output_length=9)]).records
    assert (record.error, record.output_tokens) == (None, 9)


def test_a_text_with_line_separators_is_one_event(server: ScriptedServer) -> None:
    (record,) = replay(server, [a_request(0.0, "lines", output_length=5)]).records
    assert (record.error, record.output_tokens) == (None, 5)


def test_growth_of_the_servers_counters_is_reported(server: ScriptedServer) -> None:
    results = replay(server, [a_request(0.0), a_request(0.1)], slo_scales=(1.0, 2.0))
    grown = results.counters
    assert grown is not None
    assert (grown.maps, grown.unmaps, grown.retractions) == (6, 4, 2)
    assert (grown.activations, grown.evictions) == (2, 2)
    assert results.samples[-1].kv_bytes == {"good": 2 << 20}
    assert results.summary.maps_per_minute == pytest.approx(6 / results.summary.duration_s * 60)


def test_a_server_without_status_is_replayed_all_the_same() -> None:
    with running(ScriptedServer(with_status=False)) as server:
        results = replay(server, [a_request()])
    assert results.counters is None
    assert results.samples == []
    assert results.records[0].ok


@pytest.mark.parametrize("file", [None, "admin.sock"])
def test_status_is_read_at_another_address(
    file: str | None, short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "" if file else "secret-1"  # a socket gets none
    api = ScriptedServer(with_status=False)
    uds = str(short_dir / file) if file else None
    pages = ScriptedServer(requests=api.requests, key=key, uds=uds)
    with running(api), running(pages):
        given = parse_status_url(pages.url + ("" if file else "/status"))
        results = replay(api, [a_request(), a_request()], "secret-1", status_url=given)
    assert results.counters is not None
    assert results.counters.maps == 6
    assert results.samples[-1].kv_bytes == {"good": 2 << 20}
    assert [record.ok for record in results.records] == [True, True]
    assert caplog.messages == []


NO_SERVER = r"no server responds \(.*%s\); give the address of frontend.admin"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://127.0.0.1:9", NO_SERVER % "failed"),
        ("unix:/nowhere/admin.sock", NO_SERVER % "No such file or directory"),
        (f"unix:/{'x' * 200}", NO_SERVER % "too long"),
    ],
)
def test_a_wrong_address_of_status_is_one_warning(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, address: str, says: str
) -> None:
    check_warning(replay(server, [a_request()], status_url=address), caplog, says)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            ScriptedServer(key="operator"),
            r"the server requires an API key \(status 401\); give an operator's with"
            r" --api-key or in \$OPENAI_API_KEY",
        ),
        (ScriptedServer(with_status=False), "the response to GET /status has status 404"),
        (
            ScriptedServer(status_text="<html>"),
            "the response to GET /status is not in Prism's format: .*",
        ),
    ],
    ids=["key", "missing", "format"],
)
def test_an_address_without_status_is_one_warning(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, other: ScriptedServer, says: str
) -> None:
    with running(other):
        results = replay(server, [a_request()], status_url=other.url)
    check_warning(results, caplog, says)


def check_warning(results: ReplayResults, caplog: pytest.LogCaptureFixture, says: str) -> None:
    """Checks that there is one warning and a complete replay without counters."""
    (warning,) = caplog.messages
    assert re.fullmatch(f"warning: --status-url {results.config.status_url}: {says}", warning)
    assert (results.samples, results.counters) == ([], None)
    assert [record.ok for record in results.records] == [True]


def test_other_servers_than_prism_get_neither_slos_nor_priorities() -> None:
    # vLLM rejects a priority unless it schedules by it.
    asked = a_request(slo_ttft_ms=100.0, priority=1)
    for owner, sent in (("prism", {"slo_ttft_ms": 100.0, "priority": 1}), ("sglang", {})):
        with running(ScriptedServer(owner=owner)) as server:
            results = replay(server, [asked])
            assert results.records[0].slo_ttft_ms == 100.0
            assert bool(results.config.sent_slo_scale) == bool(sent)
        (body,) = server.requests
        own = ("slo_ttft_ms", "slo_tpot_ms", "priority")
        assert {name: body[name] for name in own if name in body} == sent


def test_missing_models_are_named_with_those_served(server: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match=r"models nope are not served.*good"):
        replay(server, [a_request(model="nope")])
    assert server.requests == []


def test_requests_above_the_context_are_refused_before_the_run() -> None:
    with (
        running(ScriptedServer(context=100)) as server,
        pytest.raises(ConfigError, match=r"110 tokens, the model's context 100.*--context 100"),
    ):
        replay(server, [a_request(input_length=105)])


def test_an_unreachable_server_is_one_clear_error() -> None:
    config = RunConfig(trace="t", url="http://127.0.0.1:9", requests=1)
    with pytest.raises(ConfigError, match="no server responds"):
        asyncio.run(run_replay([a_request()], config, Seen()))


def test_an_interrupt_gives_partial_results(server: ScriptedServer) -> None:
    async def interrupted() -> ReplayResults:
        trace = [a_request(0.0), a_request(0.0, "stuck"), a_request(3600.0)]
        config = RunConfig(trace="test", url=server.url, requests=3)
        task = asyncio.create_task(run_replay(trace, config, seen))
        while len(seen.sent_requests) < 2 or not seen.records:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        return await task

    seen = Seen()
    results = asyncio.run(interrupted())
    assert results.config.interrupted
    assert [record.error for record in results.records] == [None, "interrupted"]
    assert results.summary.total.requests == 2
