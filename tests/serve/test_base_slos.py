"""`prism-replay base-slos` on prism-serve with fake engines, and a replay with its file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from prism.config.reader import read_mapping
from prism_replay.base_slos import BaseSlos, read_base_slos
from prism_replay.live.dedicated import alone
from prism_replay.results import ReplayResults, read_results
from prism_replay.trace import TraceRequest, write_trace
from tests.serve.conftest import serving, write_yaml

STEP_MS = 20
FAKE = f'{{"decode_step_ms": {STEP_MS}, "activation_s": 0.05}}'
OUTPUT_TOKENS = {"a": (4, 8), "b": (6,)}
TRACE = [
    TraceRequest(timestamp=5000 + 100 * i, model=name, input_length=20, output_length=tokens)
    for i, (name, tokens) in enumerate(
        (name, tokens) for _ in range(6) for name, each in OUTPUT_TOKENS.items() for tokens in each
    )
]
CHANGES: dict[str, Any] = {
    "devices": [
        {"name": f"host:{i}", "capacity": "16MiB", "page": "64KiB", "engines": 2} for i in (0, 1)
    ],
    "models": [
        {"name": "a", "path": "a", "replicas": {"min": 2}, "never_evict": True},
        {"name": "b", "path": "b", "tp": 2, "static_share": 0.25},
    ],
    "frontend": {"port": 0, "admin": "./admin.sock"},
    "access": {"keys": "keys.yaml"},
}


def replay(temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The tiny models have 300 tokens.
    options = ("--token-ids", "32-96")
    command = [sys.executable, "-m", "prism_replay.cli.replay", *arguments, *options]
    environment = {**os.environ, "TMPDIR": str(temporary), "PRISM_FAKE": FAKE}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )


@dataclass
class Measured:
    folder: Path
    shown: str
    found: BaseSlos


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("base-slos")
    config = write_yaml(folder, **CHANGES)
    (folder / "keys.yaml").write_text(f"keys: [{{name: x, sha256: {'a' * 64}}}]\n")
    trace, out = folder / "trace.jsonl", folder / "slos.json"
    write_trace(trace, TRACE)
    with TemporaryDirectory(prefix="prism-") as temporary:
        given = (str(config), str(trace), "--out", str(out), "--executions", "4", "--settle", "0")
        done = replay(Path(temporary), "base-slos", *given, "--logs", str(folder / "logs"))
        assert done.returncode == 0, done.stdout + done.stderr
        yield Measured(folder, done.stdout, read_base_slos(out))


def test_each_model_is_measured_alone(measured: Measured) -> None:
    found = measured.found
    assert (found.config, found.trace) == ("prism.yaml", "trace.jsonl")
    assert {name: each.requests for name, each in found.models.items()} == {"a": 12, "b": 6}
    for name, each in found.models.items():
        steps = max(OUTPUT_TOKENS[name]) - 1
        assert each.executions == 4
        assert each.tpot_ms is not None
        assert each.tpot_ms >= STEP_MS * 0.9
        assert each.e2e_ms >= STEP_MS * 0.9 * steps
        assert each.execution_ms >= STEP_MS * 0.9 * (min(OUTPUT_TOKENS[name]) - 1)
    assert all(f"measuring {name}" in measured.shown for name in "ab")
    assert sorted(path.name for path in (measured.folder / "logs").iterdir()) == ["a", "b"]
    assert not list(measured.folder.glob(".prism-*")), "the YAML of one model is removed"


def test_a_replay_is_judged_by_them(measured: Measured, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path, Path(temporary), FAKE) as cluster,
    ):
        given = (str(measured.folder / "trace.jsonl"), "--url", cluster.url, "--strict")
        chosen = ("--base-slos", str(measured.folder / "slos.json"), "--slo-scale", "0.001,1000")
        done = replay(Path(temporary), "run", *given, *chosen, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results: ReplayResults = read_results(out)
    models = measured.found.models
    for record in results.records:
        base = models[record.model]
        slos_ms = (record.slo_ttft_ms, record.slo_tpot_ms, record.slo_e2e_ms)
        assert slos_ms == (base.ttft_ms, base.tpot_ms, base.e2e_ms)
    assert [each.all for each in results.summary.total.attainment.values()] == [0.0, 1.0]
    for name, group in results.summary.models.items():
        assert group.e2e_ms.mean is not None
        expected = group.e2e_ms.mean / models[name].execution_ms
        assert group.normalized_latency == pytest.approx(expected)
    assert results.config.base_slos == "slos.json"


def test_the_yaml_of_one_model_has_no_copies_shares_or_clients(tmp_path: Path) -> None:
    data = read_mapping(write_yaml(tmp_path, **CHANGES, redis="redis://far:1", policy="prism"))
    found = alone(data, "a")
    assert found["models"] == [{"name": "a", "path": "a", "never_evict": True}]
    assert found["policy"] == "static"
    assert found["frontend"] == {}
    assert not {"redis", "access"} & found.keys()
    assert found["devices"] == CHANGES["devices"]
    assert alone(data, "b")["models"] == [{"name": "b", "path": "b", "tp": 2}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"models": [{"name": "b", "path": "b"}]}, "a are not in"),
        (
            {"ray": "auto", "devices": [{"name": "host:*", "capacity": "16MiB"}]},
            "ray: measurements are on",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    config = write_yaml(tmp_path, **changes)
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, TRACE)
    done = replay(tmp_path, "base-slos", str(config), str(trace), "--out", str(tmp_path / "s.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_request_that_fails_is_named(tmp_path: Path) -> None:
    config = write_yaml(tmp_path)
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, TRACE)
    given = ("base-slos", str(config), str(trace), "--out", str(tmp_path / "s.json"))
    with TemporaryDirectory(prefix="prism-") as temporary:
        done = replay(
            Path(temporary), *given, "--timeout", "0.001", "--logs", str(tmp_path / "logs")
        )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a: request 0 ended with 'timeout'" in done.stderr
    assert not (tmp_path / "s.json").exists()


def test_a_model_without_latencies_and_another_file_are_refused(
    measured: Measured, tmp_path: Path
) -> None:
    trace, slos = tmp_path / "trace.jsonl", measured.folder / "slos.json"
    write_trace(trace, [TraceRequest(timestamp=0, model="c", input_length=1, output_length=1)])
    done = replay(tmp_path, "run", str(trace), "--base-slos", str(slos))
    assert (done.returncode, "--base-slos: does not have c" in done.stderr) == (2, True)
    slos = tmp_path / "prism.yaml"
    slos.write_text(yaml.safe_dump({}))
    done = replay(tmp_path, "run", str(trace), "--base-slos", str(slos))
    assert (done.returncode, "prism.yaml: is not a file of" in done.stderr) == (2, True)
