"""`prism-sim` as users call it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from prism.errors import ConfigError
from prism.policies import registry
from prism_replay.cli import replay as replay_cli
from prism_replay.generators.base import generate
from prism_replay.generators.kinds import config_of, config_of_preset
from prism_replay.metrics import summarize as summarize_records
from prism_sim.cli import sim as cli
from prism_sim.cluster.world import World
from prism_sim.core.profile import loads
from prism_sim.costs.grid import Grid, write_grid
from prism_sim.costs.table import TableCost
from prism_sim.output.summary import request_records, summarize
from prism_sim.output.tables import TABLES
from prism_sim.scenario.scenario import load
from tests.costs.tables import BENT
from tests.sim.command import CONFIG, call, line


def test_the_bundled_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", "--rate-scale", "0.05") == 0
    assert "prism on 2 x h100" in capsys.readouterr().out


def test_run_writes_what_it_says(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    extras = ("--timeline", "--judge", "0.5,1")
    assert call(monkeypatch, "run", str(config), "--out", str(out), *extras) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["schema"] == "prism-sim/1"
    assert results["summary"]["total"]["completed"] == 240
    models = list(csv.DictReader((out / "models.csv").read_text().splitlines()))
    assert [row["model"] for row in models[-2:]] == ["total", "total"]
    requests = list(csv.DictReader((out / "requests.csv").read_text().splitlines()))
    assert len(requests) == 240
    assert all(float(r["arrival_s"]) <= float(r["first_token_s"]) for r in requests)
    assert {path.stem for path in out.glob("*.parquet")} == {
        path.stem for path in out.glob("*.csv")
    }
    assert {path.stem for path in out.glob("*.csv")} == {*TABLES}
    page = (out / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<svg" in page
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    opened = sum(event["ph"] == "b" for event in events)
    assert opened == sum(event["ph"] == "e" for event in events) == 3 * 240


def test_the_same_seed_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        assert call(monkeypatch, "run", str(config), "--out", str(out), "--seed", "3") == 0
    for path in outs[0].iterdir():
        assert path.read_bytes() == (outs[1] / path.name).read_bytes()


def test_a_simulation_and_the_records_of_a_replay_have_one_summary(config: Path) -> None:
    """Passes the same requests to prism-replay as records, at a load at which some are late."""
    scenario = load(config, {"rate_scale": 12, "slo_scale": 0.1, "gpus.count": 1})
    records = World(scenario.setup, scenario.work).run()
    given = loads(scenario.setup, scenario.work)
    found = summarize(records, (0.5, 1.0), given)
    rows = request_records(records, len(scenario.work))
    times_ms = [1000 * load.execution_s for load in given]
    alone_ms = dict(zip(scenario.work.models, times_ms, strict=True))
    expected = summarize_records(rows, (0.5, 1.0), found.duration_s, None, alone_ms)
    assert 0 < (found.total.attainment["1"].all or 0) < 1
    assert (found.total.normalized_latency or 0) > 1
    assert list(found.models) == list(expected.models)
    assert leaves(found) == pytest.approx(leaves(expected))


def leaves(value: Any, path: str = "") -> dict[str, float]:
    """Returns the numbers of a struct by their path."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if not isinstance(value, dict):
        return {path: value}
    parts = [leaves(each, f"{path}.{key}") for key, each in value.items()]
    return {key: number for part in parts for key, number in part.items()}


KEEP_PINS = {"prism", "prism-fcfs", "prism-free-memory", "serverlessllm", "static"}


@pytest.mark.parametrize("policy", registry.own_names())
def test_a_policy_keeps_to_a_pin_or_refuses_it(config: Path, policy: str) -> None:
    models = [{"name": "a", "shape": "Llama-3.2-1B", "device": "gpu:2"}]
    models += [{"name": "b", "shape": "Llama-3.2-1B"}]
    changes = {"policy": policy, "gpus.count": 3, "models": models}
    if policy not in KEEP_PINS:
        says = rf"models\[0\]\.device: cannot be combined with policy '{re.escape(policy)}'"
        with pytest.raises(ConfigError, match=says):
            load(config, changes)
        return
    scenario = load(config, changes)
    records = World(scenario.setup, scenario.work).run()
    homes = {(d.model, d.device) for d in records.decisions if d.kind == "activate"}
    assert {device for model, device in homes if model == "a"} == {"gpu:2"}
    assert not records.errors


@pytest.mark.parametrize(
    ("count", "nodes", "sizes"),
    [
        (8, 1, [8]),
        (8, 2, [4, 4]),
        (4, 4, [1, 1, 1, 1]),
        (9, 2, [5, 4]),
        (4, 3, [2, 1, 1]),
        (5, 4, [2, 1, 1, 1]),
        (7, 5, [2, 1, 2, 1, 1]),
        (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_gpus_are_spread_evenly_over_machines(
    config: Path, *, count: int, nodes: int, sizes: list[int]
) -> None:
    devices = load(config, {"gpus.count": count, "gpus.nodes": nodes}).setup.devices
    assert [device.name for device in devices] == [f"gpu:{i}" for i in range(count)]
    homes = [f"node{n}" for n, size in enumerate(sizes) for _ in range(size)]
    assert [device.node for device in devices] == homes


def test_a_file_that_is_not_there_is_named_without_options_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "run", str(tmp_path / "no.yaml")) == 2
    said = capsys.readouterr().err
    assert "name an existing YAML file" in said
    assert "--config" not in said


@pytest.mark.parametrize("command", ["generate", "stats", "convert"])
def test_examples_name_the_program_that_is_asked(command: str) -> None:
    for app, program, other in (
        (cli.app, ("prism-sim", "trace", command), "prism-replay"),
        (replay_cli.app, ("prism-replay", command), "prism-sim"),
    ):
        said = CliRunner().invoke(app, [*program[1:], "--help"]).output
        assert f"Example: {' '.join(program)}" in said
        assert f"Example: {other}" not in said


def test_the_generators_of_traces_are_those_of_trace_generate(config: Path) -> None:
    small = {"name": "m", "shape": "Llama-3.2-1B"}
    presets = {"kind": "bursty", "preset": "novita", "seconds": 300}
    work = load(config, {"models": [{**small, "count": 16}], "generate": presets, "seed": 3}).work
    names = [f"m-{i}" for i in range(16)]
    made = generate(config_of_preset("novita", names, {"seconds": 300, "seed": 3}))
    assert [(request.arrival_s, request.output_length) for request in made] == list(
        zip(work.arrival_s, work.output_tokens, strict=True)
    )
    steady = {"kind": "steady", "seconds": 300, "rate": 2, "alpha": 2.1, "gap_cv": 3}
    work = load(config, {"models": [{**small, "count": 4}], "generate": steady, "seed": 3}).work
    given = {"seconds": 300, "rate_rps": 2, "seed": 3, "alpha": 2.1, "gap_cv": 3}
    made = generate(config_of("steady", names[:4], given))
    assert [request.arrival_s for request in made] == list(work.arrival_s)
    shares = [{**small, "share": 1.0}]
    with pytest.raises(ConfigError, match=r"m\.share: needs generate\.kind"):
        load(config, {"models": shares, "generate": steady})


def slos_e2e_s(config: Path, changes: dict[str, Any]) -> dict[str, set[float]]:
    """Returns the end-to-end SLOs of the requests, by model."""
    work = load(config, changes).work
    found: dict[str, set[float]] = {name: set() for name in work.models}
    for model, e2e_s in zip(work.model, work.slo_e2e_s, strict=True):
        found[work.models[model]].add(round(e2e_s, 9))
    return found


def test_an_end_to_end_slo_is_of_all_or_of_a_model(config: Path) -> None:
    models = [
        {"name": "a", "shape": "Llama-3.1-8B", "slo": {"ttft": "400ms", "e2e": "9s"}},
        {"name": "b", "shape": "Llama-3.2-1B"},
    ]
    given = {"models": models, "slo": {"ttft": "1s", "tpot": "100ms", "e2e": "5s"}}
    assert slos_e2e_s(config, {**given, "slo_scale": 2}) == {"a": {18.0}, "b": {10.0}}
    work = load(config, {"slo": {"ttft": "1s", "tpot": "100ms"}, "models": models[1:]}).work
    assert list(work.slo_e2e_s) == pytest.approx([1 + 0.1 * (n - 1) for n in work.output_tokens])


def test_a_requests_own_slos_go_before_the_models(config: Path) -> None:
    rows = [
        json.loads(line(1)) | {"output_length": 11, "slo_ttft_ms": 300, "slo_tpot_ms": 20},
        json.loads(line(2)) | {"slo_e2e_ms": 700},
        json.loads(line(3)),
    ]
    (config.parent / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config.write_text(CONFIG.replace("generate: {seconds: 60, rate: 4}", "trace: t.jsonl"))
    slos_s = list(load(config).work.slo_e2e_s)
    assert slos_s == pytest.approx([0.3 + 0.02 * 10, 0.7, 0.4])
    given = {"models": [{"name": "a", "shape": "Llama-3.1-8B", "slo": {"e2e": "9s"}}]}
    assert list(load(config, given).work.slo_e2e_s) == pytest.approx([9.0, 0.7, 9.0])


def test_measured_costs_go_before_shipped_ones(config: Path) -> None:
    table = msgspec.structs.replace(BENT, gpu="h100", model="Llama-3.1-8B")
    grid = Grid(package="p", version="1", license="", tables=(table,))
    write_grid(config.parent / "costs.json", grid)
    config.write_text(CONFIG + "cost_files: [costs.json]\n")
    measured, other = load(config).setup.models[:2]
    assert measured.parts[1].cost.decode_s(4, 200) == TableCost(table).decode_s(4, 200)
    assert other.parts[1].cost.decode_s(4, 200) != measured.parts[1].cost.decode_s(4, 200)
    config.write_text(CONFIG + "cost_files: [none.json]\n")
    with pytest.raises(ConfigError, match=r"none\.json"):
        load(config)


def test_traces_and_costs_have_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.jsonl"
    generate = ["trace", "generate", "--preset", "novita", "--seconds", "600", "--out", str(out)]
    assert call(monkeypatch, *generate) == 0
    assert call(monkeypatch, "trace", "stats", str(out)) == 0
    assert "changes of the active set" in capsys.readouterr().out
    assert call(monkeypatch, "trace", "stats", str(tmp_path / "none.jsonl")) == 2
    assert call(monkeypatch, "calibrate", "show", "--gpu", "h100", "--model", "Qwen3-8B") == 0
    assert call(monkeypatch, "calibrate", "show", "--gpu", "odd", "--model", "Qwen3-8B") == 2
    assert "gpu 'odd'" in capsys.readouterr().err


LONG = "a-model-whose-name-is-longer-than-a-terminal-with-eighty-columns-in-which-tables-are-cut"


def test_tables_in_a_pipe_have_whole_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Checks that names are not cut at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    path, trace = tmp_path / "cluster.yaml", tmp_path / "trace.jsonl"
    path.write_text(f"models: [{{name: {LONG}, shape: Llama-3.2-1B}}]\ntrace: trace.jsonl\n")
    trace.write_text(line(0, LONG) + "\n" + line(50, LONG))
    vary = ("--vary", f"trace={trace}", "--out", str(tmp_path / "out"))
    for arguments in (("run", str(path)), ("sweep", str(path), *vary)):
        assert call(monkeypatch, *arguments) == 0
        assert (LONG if arguments[0] == "run" else str(trace)) in capsys.readouterr().out
    replayed = CliRunner().invoke(replay_cli.app, ["stats", str(trace)], env={"COLUMNS": "80"})
    assert replayed.exit_code == 0
    assert LONG in replayed.output
