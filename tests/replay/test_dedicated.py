"""Requests that measure a dedicated engine, against a server with scripted delays."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from prism_replay.base_slos import BaseLatencies
from prism_replay.live.dedicated import Measurement, MeasurementError, measure_server
from prism_replay.live.runner import Observer
from prism_replay.results import RunConfig
from prism_replay.trace import Trace, TraceRequest
from tests.replay.records import a_request
from tests.replay.scripted_server import SLOW_STEP_S, ScriptedServer
from tests.replay.test_run import Seen


class Before(Seen):
    """Observer that keeps how many requests were open at a time before the replay."""

    def __init__(self, server: ScriptedServer) -> None:
        super().__init__()
        self.server, self.open_most = server, 0

    def sent(self, request: TraceRequest) -> None:
        self.open_most = self.open_most or self.server.in_flight_most


def measured(
    server: ScriptedServer, trace: Trace, executions: int, observer: Observer | None = None
) -> BaseLatencies:
    options = RunConfig(trace="test", url=server.url, requests=len(trace))
    given = Measurement(
        config=Path("prism.yaml"),
        trace=trace,
        options=options,
        executions=executions,
        settle_s=0.0,
        logs=Path("logs"),
        observer=lambda model, requests: nullcontext(Seen()),
    )
    return asyncio.run(measure_server(given, trace, options, observer or Seen()))


def test_no_prompt_is_sent_twice(server: ScriptedServer) -> None:
    """Measures with other prompts than the texts and blocks of the trace."""
    trace = [a_request(0.0, prompt="Hello"), a_request(0.0, hash_ids=(7,)), a_request(0.0)]
    found = measured(server, trace, executions=3)
    prompts = [body["prompt"] for body in server.requests]
    assert len({str(prompt) for prompt in prompts}) == len(prompts) == 1 + 3 + 3
    assert [len(prompt) for prompt in prompts[:4]] == [10] * 4
    assert "Hello" in prompts[4:]
    assert (found.requests, found.executions) == (3, 3)


def test_executions_do_not_overlap_and_are_spread_over_the_trace(server: ScriptedServer) -> None:
    lengths = [3, 30, 4, 30, 5, 30, 6]
    trace = [a_request(0.0, "slow", output_length=length) for length in lengths]
    before = Before(server)
    found = measured(server, trace, 3, before)
    assert before.open_most == 1
    assert server.in_flight_most > 1
    assert [body["max_tokens"] for body in server.requests[:4]] == [3, 3, 4, 5]
    assert found.execution_ms >= 1000 * SLOW_STEP_S * (3 + 4 + 5) / 3
    assert (found.requests, found.executions) == (7, 3)


def test_outputs_of_one_token_have_no_tpot(server: ScriptedServer) -> None:
    found = measured(server, [a_request(0.0, output_length=1)], executions=8)
    assert (found.tpot_ms, found.executions) == (None, 1)


def test_a_failure_names_model_and_request(server: ScriptedServer) -> None:
    with pytest.raises(MeasurementError, match="refused: request 0 ended with 'unavailable'"):
        measured(server, [a_request(0.0, "refused")], executions=1)
