"""The command line: its output files, its exit codes, one line for each mistake."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prism.cli.exit_codes import run
from prism_replay.cli.replay import app
from prism_replay.results import read_results
from prism_replay.trace import models_of, read_trace, write_trace
from tests.replay.records import a_request
from tests.replay.scripted_server import ScriptedServer, running


def cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app([str(argument) for argument in arguments]), "prism-replay")
    return int(ended.value.code or 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    slos = {"slo_ttft_ms": 60_000.0, "slo_tpot_ms": 60_000.0, "slo_e2e_ms": 60_000.0}
    write_trace(path, [a_request(0.05 * number, **slos) for number in range(4)])
    return path


def test_a_run_writes_results_and_report_and_prints_both_tables(
    server: ScriptedServer, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "new" / "r.json", tmp_path / "r.html"
    options = ["--slo-scale", "0.5,1", "--seed", 3, "--rate-scale", 2, "--limit", 6, "--strict"]
    assert cli("run", trace, "--url", server.url, "--out", out, "--report", html, *options) == 0
    results = read_results(out)
    assert (results.config.seed, results.config.slo_scales) == (3, (0.5, 1.0))
    assert [record.ok for record in results.records] == [True] * 6
    assert "<html" in html.read_text()
    shown = capsys.readouterr().out
    assert "SLO attainment" in shown
    assert "maps 18 (" in shown
    assert cli("report", out, "--out", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_text() == html.read_text()


def test_a_server_of_another_kind_is_an_error_of_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(ScriptedServer()) as server:
        assert cli("run", trace, "--url", f"{server.url}/other") == 2
    said = capsys.readouterr().err
    assert "the response to GET /v1/models is not in OpenAI's format: Client error '404" in said
    assert said.count("\n") == 1


def test_a_key_is_sent_and_not_kept(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run.json"
    with running(ScriptedServer(key="secret-1")) as server:
        command = ["run", trace, "--url", f"{server.url}/v1/", "--out", out, "--strict"]
        missing = "the server requires an API key (status 401); give it with --api-key or in"
        wrong = "the server did not accept the API key (status 401); give another one with"
        for key, code, says in (("", 2, missing), ("wrong", 2, wrong), ("secret-1", 0, "")):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            assert cli(*command) == code
            shown = capsys.readouterr()
            assert says in shown.err
            assert ("API key" in shown.err) == (code == 2)
            assert "secret-1" not in shown.out + shown.err
        monkeypatch.delenv("OPENAI_API_KEY")
        assert cli(*command, "--api-key", "secret-1") == 0
    assert "secret-1" not in out.read_text()


@pytest.mark.parametrize(("scales", "sent"), [("0.5,1,2", 1.0), ("5", 5.0), ("8,4", 4.0)])
def test_the_server_gets_the_slos_of_the_scale_nearest_to_1(
    server: ScriptedServer, trace: Path, tmp_path: Path, scales: str, sent: float
) -> None:
    out = tmp_path / "r.json"
    assert cli("run", trace, "--url", server.url, "--slo-scale", scales, "--out", out) == 0
    assert {body["slo_ttft_ms"] for body in server.requests} == {60_000.0 * sent}
    assert {body["slo_tpot_ms"] for body in server.requests} == {60_000.0 * sent}
    results = read_results(out)
    assert {record.slo_ttft_ms for record in results.records} == {60_000.0}
    assert results.config.sent_slo_scale == sent


def test_strict_runs_fail_when_a_request_did(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [a_request(model="refused")])
    assert cli("run", path, "--url", server.url) == 0
    assert cli("run", path, "--url", server.url, "--strict") == 1


def test_interrupting_the_process_leaves_partial_results(
    server: ScriptedServer, tmp_path: Path
) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    write_trace(path, [a_request(), a_request(0.0, "stuck"), a_request(900.0)])
    command = [sys.executable, "-m", "prism_replay.cli.replay", "run", path, "--url", server.url]
    process = subprocess.Popen([*command, "--out", out], stdout=subprocess.PIPE, text=True)
    while len(server.requests) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    # The request for "good" may have been under way as well when the signal came.
    assert re.search("[12] x interrupted", shown)
    assert read_results(out).config.interrupted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--slo-scale", "1,x"], "--slo-scale"),
        (["--slo-scale", "0"], "--slo-scale"),
        (["--token-ids", "7"], "--token-ids"),
        (["--rate-scale", "0"], "rate scale"),
        (["--time-scale", "-1"], "time scale"),
        (["--url", "http://127.0.0.1:9"], "no server responds"),
        (
            ["--url", "127.0.0.1:80/v1"],
            "is not a URL with http:// or https://; give http://127.0.0.1:80/v1",
        ),
        (["--url", "ftp://host"], "is not a URL with http:// or https://; give http://HOST:PORT"),
        (["--url", "http://[::1"], "is not a URL"),
        (["--url", "http://host:abc"], "is not a URL"),
        (["--url", "http://host:99999"], "is not a URL"),
        (["--url", "http://a\u2028b"], "is not a URL"),
        (
            ["--status-url", "127.0.0.1:9001"],
            "--status-url 127.0.0.1:9001: is not a URL with http:// or https://; give"
            " http://127.0.0.1:9001, or unix:PATH for a Unix socket",
        ),
        (
            ["--status-url", "/a.sock"],
            "--status-url /a.sock: is not a URL with http:// or https://",
        ),
        (["--status-url", "unix:"], "--status-url unix:: does not have a path; give unix:PATH"),
        (["--api-key", "sk-a\nb"], "--api-key: has characters that no key can have; copy it again"),
        (["--api-key", "schlüssel"], "--api-key: has characters that no key can have"),
        (["--out", "/proc/x/r.json"], "/proc/x/r.json: cannot be written"),
        (["--html", "/"], "/: cannot be written"),
    ],
)
def test_wrong_run_options_are_one_line_and_exit_2(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert cli("run", trace, *options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("prism-replay: ")
    assert says in error


def test_missing_models_exit_2_and_are_named(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [a_request(model="nope")])
    assert cli("run", path, "--url", server.url) == 2
    assert "nope" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "none.jsonl"],
        ["stats", "none.jsonl"],
        ["report", "none.json"],
        ["generate", "--models", "a,a", "--out", "t.jsonl"],
        ["generate", "--models", "a:x", "--out", "t.jsonl"],
        ["generate", "--models", "a", "--input-tokens", "9", "--out", "t.jsonl"],
        ["generate", "--models", "a", "--output-tokens", "0:9", "--out", "t.jsonl"],
        ["generate", "--models", "a", "--slo", "fast", "--out", "t.jsonl"],
        ["generate"],
        ["nonsense"],
    ],
)
def test_wrong_arguments_exit_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(*arguments) == 2
    assert not list(tmp_path.iterdir())


def test_generate_gives_the_same_bytes_again_and_stats_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    for path in (first, second):
        arguments = ["--models", "a:0.5,b,c", "--seconds", 600, "--rate", 0.5, "--seed", 4]
        assert cli("generate", *arguments, "--slo", "b=100/10", "--out", path) == 0
    assert first.read_bytes() == second.read_bytes()
    assert len(read_trace(first)) == 300
    capsys.readouterr()
    assert cli("stats", first, "--seconds", 600) == 0
    shown = capsys.readouterr().out
    assert "300 requests in 600 s" in shown
    assert "50.0 %" in shown


def test_convert_maps_a_public_trace_onto_the_models_at_hand(
    public_traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.jsonl"
    arguments = ["--models", "a,b,c", "--limit", 300, "--context", 256, "--output-max", 64]
    source = public_traces / "arena_chat27_vtc.csv"
    options = ["--length-scale", 0.5, "--time-scale", 0.5, "--slo", "900/90", "--out", out]
    assert cli("convert", source, "--format", "arena", *arguments, *options) == 0
    trace = read_trace(out)
    assert (len(trace), models_of(trace)) == (300, ["a", "b", "c"])
    assert max(r.input_length + r.output_length for r in trace) <= 256
    assert max(r.output_length for r in trace) == 64
    assert {(r.slo_ttft_ms, r.slo_tpot_ms) for r in trace} == {(900.0, 90.0)}


def test_convert_keeps_slos_that_the_source_has(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    assert cli("convert", trace, "--models", "new", "--start", 0.05, "--out", out) == 0
    found = read_trace(out)
    assert [(r.model, r.timestamp, r.slo_ttft_ms) for r in found] == [
        ("new", 0.0, 60_000.0),
        ("new", 50.0, 60_000.0),
        ("new", 100.0, 60_000.0),
    ]
    assert cli("convert", trace, "--models", "new", "--length-scale", 0.5, "--out", out) == 2


@pytest.mark.parametrize("command", ["run", "report", "generate", "stats", "convert"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(command, "--help") == 0
    assert re.search(f"Examples?: prism-replay {command}", capsys.readouterr().out)
