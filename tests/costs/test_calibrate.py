"""Measurements of a live server: a scripted one, and a whole cluster with the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from prism.errors import ConfigError
from prism_replay.live.client import Endpoint, StreamChoice, StreamEvent
from prism_sim.cli.costs import app
from prism_sim.costs.calibrate import CalibrationPlan, TimedStream, common_paces_s, measure, save
from prism_sim.costs.catalog import cost_model
from prism_sim.costs.fit import MeasuredStep
from prism_sim.costs.grid import read_grid
from tests.costs.tables import BENT
from tests.replay.scripted_server import ScriptedServer, running
from tests.serve.conftest import serving

QUICK = CalibrationPlan("slow", (8, 16, 32), (1, 2), output_tokens=4, repeats=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with running(ScriptedServer()) as found:
        yield found


def test_each_point_is_asked_for_once_and_prompts_share_nothing(server: ScriptedServer) -> None:
    del server.requests[:]
    seen: list[MeasuredStep] = []
    steps = asyncio.run(measure(Endpoint(server.url), QUICK, seen.append))
    assert seen == steps
    assert [(s.prompt, s.tokens, s.context_tokens) for s in steps] == [
        (True, 8, 0),
        (True, 16, 0),
        (True, 32, 0),
        (False, 1, 8 + 2),
        (False, 1, 16 + 2),
        (False, 2, 2 * (8 + 2)),
        (False, 2, 2 * (16 + 2)),
    ]
    assert all(step.seconds > 0 for step in steps)
    prompts = [body["prompt"] for body in server.requests]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)
    assert [len(prompt) for prompt in prompts] == [8, 8, 8, 16, 16, 32, 32, 8, 16, 8, 8, 16, 16]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (CalibrationPlan("none", (8, 16, 32), (1,)), "model 'none': the server offers good"),
        (CalibrationPlan("slow", (8, 16, 5000), (1,)), "context of 5001, and slow has 4096"),
        (CalibrationPlan("refused", (8, 16, 32), (1,)), "8 tokens failed: unavailable no room"),
        (CalibrationPlan("dying", (8, 16, 32), (1,)), "failed: engine_died killed"),
    ],
)
def test_a_server_that_cannot_be_measured_is_named(
    server: ScriptedServer, plan: CalibrationPlan, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        asyncio.run(measure(Endpoint(server.url), plan))


def test_the_pace_counts_only_while_all_streams_run() -> None:
    streams = [TimedStream(times_s=[1.0, 2.0, 3.0, 4.0]), TimedStream(times_s=[1.5, 3.0, 3.5, 5.0])]
    # from 1.5 to 4: tokens at 2, 3, 4 and at 1.5, 3, 3.5
    assert common_paces_s(streams) == [1.0, 1.0]
    assert common_paces_s([TimedStream(times_s=[1.0]), TimedStream(times_s=[2.0])]) == []
    # tokens that arrive in clumps do not change it
    assert common_paces_s([TimedStream(times_s=[1.0, 3.0, 3.0, 5.0, 5.0])]) == [1.0]


def test_a_timed_stream_has_a_time_per_token() -> None:
    stream = TimedStream()
    stream.take(StreamEvent(choices=[StreamChoice(token_ids=[7, 8])]), 1.0)
    stream.take(StreamEvent(choices=[StreamChoice(token_ids=[9])]), 2.0)
    stream.take(StreamEvent(choices=[StreamChoice(text="", finish_reason="length")]), 3.0)
    assert stream.times_s == [1.0, 1.0, 2.0]


def test_saving_replaces_the_table_of_the_same_model_and_keeps_others(tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "costs.json"
    other = msgspec.structs.replace(BENT, model="other")
    for table in (BENT, other, msgspec.structs.replace(BENT, host_s=0.7)):
        save(path, table)
    assert {t.model: t.host_s for t in read_grid(path).tables} == {"other": 0.05, "m": 0.7}


def test_bad_options_are_named(tmp_path: Path) -> None:
    out = str(tmp_path / "costs.json")
    for option, value in (("--prompts", "8,x"), ("--batches", "0,1")):
        arguments = ["--url", "http://x", "--model", "m", "--out", out, option, value]
        result = CliRunner().invoke(app, ["engine", *arguments])
        assert isinstance(result.exception, ConfigError)
        assert option in str(result.exception)


def test_a_cluster_with_the_fake_engine_is_calibrated(tmp_path: Path) -> None:
    """Runs the whole path on the host device. The table is valid, is read back, and has decode
    steps of the fake engine of 4 ms at least."""
    fake = '{"prefill_tokens_per_s": 20000, "decode_step_ms": 4}'
    out = tmp_path / "costs.json"
    with TemporaryDirectory(prefix="prism-") as run, serving(tmp_path, Path(run), fake) as cluster:
        arguments = ["--url", cluster.url, "--model", "a", "--out", str(out)]
        points = ["--prompts", "8,32,128", "--batches", "1,2", "--token-ids", "100-200"]
        result = CliRunner().invoke(app, ["engine", *arguments, *points, "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert "error of the fit" in result.output
    cost = cost_model("host", "a", files=(out,))
    assert cost.decode_run_s(1, 100, 10) >= 10 * 0.004 * 0.5
    assert cost.prefill_s(128) > 0
