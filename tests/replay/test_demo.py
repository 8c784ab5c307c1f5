"""The demo end to end with fake engines: real processes, Redis, sockets and ledgers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from msgspec import structs

from lab.demo import losses, misses
from lab.demo.page import Gain, TimedAction, actions_of, gains, write_page
from prism.config.resolve import load
from prism.scheduler.decision_journal import Ended, Opened, Started
from prism_replay.metrics import summarize
from prism_replay.results import (
    PlacementChange,
    ReplayResults,
    RequestRecord,
    RunConfig,
    read_results,
    write_results,
)
from prism_replay.trace import models_of, read_trace, write_trace
from tests.engines.subjects import prepared
from tests.replay.records import a_record, a_request

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def write_config(directory: Path, **changes: object) -> Path:
    """Writes a cluster of one small device that serves tiny-llama with fake engines."""
    config = {
        "devices": [{"name": "host:0", "capacity": "128MiB", "page": "64KiB", "engines": 1}],
        "models": [{"name": "tiny-llama", "path": "models/tiny-llama", "context_length": 256}],
        "engine": {"adapter": "fake", "static": "1MiB"},
        "journal": {"keep": "decisions"},
    }
    path = directory / "demo.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


def start_demo(directory: Path, config: Path, trace: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lab.demo.__main__", "--config", config, "--trace", trace]
    return subprocess.Popen(
        [*command, "--results", directory / "results"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
        start_new_session=True,
    )


def wait_for_one_answer(url: str) -> None:
    """Waits until the cluster has finished a request."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        status = httpx.get(f"{url}/status", timeout=10).json()
        if any(m.get("finished_total") for a in status["agents"] for m in a["models"]):
            return
        time.sleep(0.1)
    raise TimeoutError("no request was finished")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [a_request(0.1 * number, "tiny-llama") for number in range(6)])
    return path


def test_the_demo_serves_replays_reports_and_leaves_nothing(short_dir: Path, trace: Path) -> None:
    demo = start_demo(short_dir, write_config(short_dir), trace)
    shown, _ = demo.communicate(timeout=200)
    assert demo.returncode == 0, shown
    assert "all processes have ended" in shown
    results = read_results(short_dir / "results" / "demo.json")
    assert results.summary.total.completed == 6
    assert results.summary.total.errors == {}
    assert (short_dir / "results" / "demo-replay.html").exists()
    assert read_results(short_dir / "results" / "demo-fixed.json").summary.total.completed == 6
    page = (short_dir / "results" / "demo.html").read_text()
    assert 'id="memory-shared"' in page
    assert 'id="memory-fixed"' in page
    assert "<tr><td>models served</td><td>1 of 1</td><td>1 of 1</td></tr>" in page
    for text in (shown, page):
        assert "tiny-llama is activated on host:0" in text
    assert "least pressed device with room" in page
    assert not list(short_dir.glob("prism-demo-*"))


def test_steps_are_printed_in_the_replays_time() -> None:
    moved = {"kind": "migrate", "model": "a", "device": "host:0", "target": "host:1"}
    records = [
        Opened(time_s=50.0, unix_s=1000.0, source="cluster", policy="prism"),
        Started(time_s=52.0, kind="activate", model="a", device="host:0", reason="wanted"),
        Ended(time_s=53.0, kind="activate", model="a", device="host:0"),
        Started(time_s=70.5, reason="relief", **moved),
    ]
    assert list(actions_of(records, 1010.0)) == [
        TimedAction(-8.0, "a is activated on host:0", "wanted"),
        TimedAction(10.5, "a migrates from host:0 to host:1", "relief"),
    ]


def test_the_reason_of_a_missed_slo() -> None:
    def record(index: int, **fields: object) -> RequestRecord:
        return a_record(index, "a", **fields)

    late = {"ttft_ms": 150.0}
    records = [
        record(0, **late),  # its model's activation ended after its arrival
        record(9, **late),  # nothing was activated then
        record(11, tpot_ms=30.0),
        record(12, e2e_ms=200.0),
        record(13, error="timeout", ttft_ms=None, tpot_ms=None, e2e_ms=None),
        record(14),
    ]
    summary = summarize(records, (1.0,), 20.0, None)
    config = RunConfig(trace="t", url="u", requests=6)
    changes = [
        PlacementChange(-1.0, "activate", "a", "host:0", seconds=1.1),
        PlacementChange(9.0, "activate", "b", "host:0", seconds=1.0),
        PlacementChange(9.0, "evict", "a", "host:0"),
    ]
    found = misses.reasons(ReplayResults(config, records, [], None, summary, changes))["a"]
    assert found == dict.fromkeys(("activation", "queue", "tokens", "end", "failed"), 1)
    assert misses.in_words(found).startswith("1 got no answer, 1 waited while the model was")


def replayed(answers: dict[str, list[bool | None]], trace: str = "demo.jsonl") -> ReplayResults:
    """Returns results of a replay.

    Args:
        answers: Model -> whether each request met its SLO; None: it got no answer.
    """
    failed = {"error": "timeout", "ttft_ms": None, "tpot_ms": None, "e2e_ms": None}
    met_by = [(model, met) for model, each in answers.items() for met in each]
    records = [
        a_record(n, model, **(failed if met is None else {"ttft_ms": 50.0 if met else 150.0}))
        for n, (model, met) in enumerate(met_by)
    ]
    config = RunConfig(trace=trace, url="u", requests=len(records))
    summary = summarize(records, (1.0,), 20.0, None)
    return ReplayResults(config, records, [], None, summary, [])


SHARED = replayed({"a": [True] * 47 + [False], "large": [True, False]})
FIXED = replayed({"a": [True] * 48, "large": [None, None]})


def test_equal_figures_are_emphasised_on_neither_side() -> None:
    """Gives both sides 48 of 50 requests within their SLO, for different reasons."""
    found = {gain.name: gain for gain in gains(SHARED, FIXED)}
    assert found["models served"] == Gain("models served", "2 of 2", "1 of 2", "shared")
    within = found["requests within their SLO"]
    assert (within.shared, within.fixed, within.better) == ("96.0 %", "96.0 %", "neither")
    assert found["memory in use, on average"].better == "neither"
    worse = replayed({"a": [True] * 46 + [False] * 2, "large": [True, False]})
    (within,) = [gain for gain in gains(worse, FIXED) if "SLO" in gain.name]
    assert (within.shared, within.fixed, within.better) == ("94.0 %", "96.0 %", "fixed")


def test_a_sentence_says_what_each_side_lost() -> None:
    assert losses.sentence("Shared memory", SHARED) == (
        "Shared memory served all 2 models, and missed the SLO of 2 requests, which waited for "
        "other requests."
    )
    assert losses.sentence("Fixed shares", FIXED) == (
        "Fixed shares served 1 of 2 models, answered none of the 2 requests of large, and missed "
        "the SLO of no other request."
    )
    slow = replayed({"a": [True, False, None], "large": [None]})
    assert losses.sentence("Fixed shares", slow).endswith(
        "answered not the only request of large, and missed the SLO of 2 other requests: 1 got no "
        "answer, 1 waited for other requests."
    )


def test_the_page_shows_losses_and_how_its_trace_is_made(tmp_path: Path) -> None:
    shown = {}
    for trace in ("demo.jsonl", "other.jsonl"):
        shared = structs.replace(SHARED, config=structs.replace(SHARED.config, trace=trace))
        write_results(tmp_path / "shared.json", shared)
        write_results(tmp_path / "fixed.json", FIXED)
        paths = (tmp_path / name for name in ("shared.json", "journal", "r.html", "fixed.json"))
        write_page(tmp_path / "demo.html", *paths)
        shown[trace] = (tmp_path / "demo.html").read_text()
    page = shown["demo.jsonl"]
    row = "<td>requests within their SLO</td><td>96.0 %</td><td>96.0 %</td>"
    assert row in page
    assert "<td><strong>2 of 2</strong></td><td>1 of 2</td>" in page
    assert "Fixed shares served 1 of 2 models" in page
    assert "traces/make_demo.py" in page
    assert "traces/make_demo.py" not in shown["other.jsonl"]


def test_the_model_without_a_fixed_share_has_a_tenth_of_the_requests() -> None:
    trace = read_trace(ROOT / "traces" / "demo.jsonl")
    assert sum(request.model == "smollm2-135m" for request in trace) >= len(trace) / 10


def test_the_shipped_trace_is_what_its_program_writes() -> None:
    program = [sys.executable, ROOT / "traces" / "make_demo.py"]
    written = subprocess.run(program, capture_output=True, check=True).stdout
    assert written == (ROOT / "traces" / "demo.jsonl").read_bytes()


def replaying_demo(directory: Path, trace: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts a demo that has one answer and waits ten minutes for the next request; returns it and
    its output."""
    write_trace(trace, [a_request(0.0, "tiny-llama"), a_request(600.0, "tiny-llama")])
    (directory / "models").symlink_to(prepared("tiny-llama").parent)  # its making is shown above
    demo = start_demo(directory, write_config(directory), trace)
    assert demo.stdout
    shown = ""
    while "--url" not in shown:
        line = demo.stdout.readline()
        assert line, shown
        shown += line
    wait_for_one_answer(shown.split("--url ")[1].split()[0])
    return demo, shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_demo_ends_the_server(
    short_dir: Path, trace: Path, number: signal.Signals
) -> None:
    demo, shown = replaying_demo(short_dir, trace)
    below = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(number)
    rest, _ = demo.communicate(timeout=100)
    assert demo.returncode == 128 + number, shown + rest
    assert not psutil.wait_procs(below, timeout=10)[1]
    assert not list(short_dir.glob("prism-demo-*"))


def test_ctrl_c_ends_the_server_and_keeps_partial_results(short_dir: Path, trace: Path) -> None:
    demo, shown = replaying_demo(short_dir, trace)
    below = psutil.Process(demo.pid).children(recursive=True)
    os.killpg(demo.pid, signal.SIGINT)
    rest, _ = demo.communicate(timeout=100)
    assert demo.returncode == 130, shown + rest
    assert read_results(short_dir / "results" / "demo.json").config.interrupted
    assert not psutil.wait_procs(below, timeout=10)[1]


def test_wrong_settings_end_with_2_and_leave_nothing(short_dir: Path, trace: Path) -> None:
    demo = start_demo(short_dir, write_config(short_dir, polocy="prism"), trace)
    shown, _ = demo.communicate(timeout=100)
    assert demo.returncode == 2
    assert "polocy" in shown
    assert not list(short_dir.glob("prism-demo-*"))


def test_the_shipped_config_serves_the_shipped_trace() -> None:
    config = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    trace = read_trace(ROOT / "traces" / "demo.jsonl")
    contexts = {model["name"]: model["context_length"] for model in config["models"]}
    slos = {model["name"]: model["slo"] for model in config["models"]}
    assert set(models_of(trace)) == set(contexts)
    for request in trace:
        assert request.input_length + request.output_length <= contexts[request.model]
        ttft_ms = float(slos[request.model]["ttft"].removesuffix("ms").replace("s", "000"))
        assert request.slo_ttft_ms == ttft_ms


def test_the_shipped_config_is_valid_where_the_models_are_prepared() -> None:
    command = [str(Path(sys.executable).parent / "prism-models"), "prepare"]
    subprocess.run([*command, "--dir", ROOT / ".cache" / "models"], check=True, timeout=300)
    config = load(ROOT / "examples" / "demo.yaml")
    assert [device.page_bytes for device in config.devices] == [65536, 65536]
