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

from prism.cli import replay as replay_cli
from prism.cli import sim as cli
from prism.costs.grid import Grid, write_grid
from prism.costs.table import TableCost
from prism.errors import ConfigError
from prism.policies import registry
from prism.replay.generate import generate
from prism.replay.kinds import config_of, config_of_preset
from prism.replay.metrics import summarize as summarize_records
from prism.sim.scenario import load
from prism.sim.summary import request_records, summarize
from prism.sim.tables import TABLES
from prism.sim.world import World
from tests.costs.tables import BENT
from tests.sim.command import call

CONFIG = """
gpus: {type: h100, count: 2, memory: 40GiB}
models:
  - {name: a, shape: Llama-3.1-8B, slo: {ttft: 400ms, tpot: 40ms}}
  - {name: b, shape: Llama-3.2-1B, count: 3}
generate: {seconds: 60, rate: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


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


def test_summary_agrees_with_that_of_prism_replay(config: Path) -> None:
    scenario = load(config, {"rate_scale": 12, "slo_scale": 0.1, "gpus.count": 1})
    records = World(scenario.setup, scenario.work).run()
    found = summarize(records, (0.5, 1.0))
    rows = request_records(records, len(scenario.work))
    expected = summarize_records(rows, (0.5, 1.0), found.duration_s, None)
    assert 0 < (found.total.attainment["1"].all or 0) < 1
    assert found.models.keys() == expected.models.keys()
    for name in ("", *found.models):
        ours = found.models[name] if name else found.total
        theirs = expected.models[name] if name else expected.total
        assert ours.attainment.keys() == theirs.attainment.keys()
        for scale, part in ours.attainment.items():
            for metric in ("ttft", "tpot", "e2e", "all"):
                value = getattr(theirs.attainment[scale], metric)
                assert getattr(part, metric) == pytest.approx(value)
        assert ours.ttft_ms.p99 == pytest.approx(theirs.ttft_ms.p99)
        assert (ours.requests, ours.completed) == (theirs.requests, theirs.completed)


KEEP_PINS = {"prism", "serverlessllm", "static"}


@pytest.mark.parametrize("policy", registry.own_names())
def test_a_policy_keeps_to_a_pin_or_refuses_it(config: Path, policy: str) -> None:
    models = [{"name": "a", "shape": "Llama-3.2-1B", "device": "gpu:2"}]
    models += [{"name": "b", "shape": "Llama-3.2-1B"}]
    changes = {"policy": policy, "gpus.count": 3, "models": models}
    if policy not in KEEP_PINS:
        says = rf"models\[0\]\.device: {re.escape(policy)} keeps no model to a GPU"
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


MISTAKES = (
    ("scheduler: {migrate_running: stop}", "migrate_running: 'stop' is not one of finish, move"),
    ("policy: magic", "policy: there is no 'magic'"),
    ("trace: none.jsonl", "trace: give either"),
    ("slo_scale: 0", "slo_scale: 0 must be above 0"),
    ("gpus: {type: h100, count: 1, nodes: 2}", "gpus.count: 1 GPUs on 2 nodes"),
    ("gpus: {type: h1000}", "gpu 'h1000': known types are"),
    ("gpus: {kind: h100}", "gpus.kind: unknown key"),
    ("engine: {kv_layout: odd}", "engine.kv_layout: 'odd'"),
    (
        "baselines: {search_rates: odd}",
        "baselines.search_rates: 'odd' is not one of mean, peak, equal",
    ),
    ("baselines: {static_kv: odd}", "baselines.static_kv: 'odd' is not one of equal, tokens"),
    ("baselines: {qlm_group: 0}", "baselines.qlm_group and seallm_services: must be at least 1"),
    ("baselines: {muxserve_prefill: 0}", "baselines.muxserve_prefill must be in (0, 1]"),
    ("baselines: {muxserve_adapt: 0s}", "baselines.muxserve_adapt"),
    ("baselines: {seallm_starvation: 0}", "seallm_starvation above 0"),
    ("models: []", "models: name at least one"),
    (
        "models: [{name: a, shape: Llama-3.1-8B}, {name: b, shape: Llama-3.2-1B, device: 'gpu:2'}]",
        "models[1].device: there is no 'gpu:2'; the GPUs are gpu:0 to gpu:1",
    ),
    ("models: [{name: a, device: ''}]", "models[0].device: there is no ''"),
    (
        "models: [{name: a, tp: 2, device: 'gpu:0'}]",
        "models[0].device: with tp 2 there are several; leave the key out",
    ),
    ("models: [{name: a}]", "a.shape: model 'a': known models are"),
    ("models: [{name: a, shape: Llama-3.1-70B}]", "a: weights, engine and one request"),
    ("models: [{name: a, shape: Llama-3.1-8B, tp: 3}]", "a.tp: 3 GPUs are needed"),
    ("models: [{name: a, shape: Llama-3.1-8B, tp: 0}]", "a.tp: 0 must be at least 1"),
    ("generate: {kind: odd}", "generate.kind: 'odd' is not one of production, bursty, steady"),
    ("generate: {preset: novita}", "generate.preset: is of kind bursty, this is production"),
    ("generate: {kind: bursty, preset: novita}", "models: preset novita needs 16 models, not 4"),
    ("generate: {kind: bursty, preset: odd}", "generate: preset 'odd': known are"),
    ("generate: {kind: steady, active_fraction: 1}", "generate.active_fraction: is of kind prod"),
    ("generate: {kind: steady, rate: 0}", "generate: rate: 0 must be above 0"),
    ("slo: {ttft: soon}", "slo.ttft: 'soon' is not a time"),
    ("slo: {e2e: soon}", "slo.e2e: 'soon' is not a time"),
    ("seed: -1", "seed: -1 must be at least 0"),
    ("generate: {input_median: 0}", "generate: input_median: 0 must be from 1"),
    ("generate: {output_median: -1}", "generate: output_median: -1 must be from 1"),
    ("generate: {input_median: .nan}", "generate.input_median: nan is not a finite number"),
    ("generate: {input_max: 0}", "generate: input_max: 0 must be from 1"),
    ("generate: {rate: 1.0e+30}", "more than the 20,000,000 requests that a trace may have"),
    ("generate: {seconds: 1.0e+30}", "generate: seconds: 1e+30 must be at most 1e+09"),
    ("generate: {gap_cv: 1.0e+200}", "generate: gap_cv: 1e+200 must be from"),
    ("generate: {kind: steady, gap_cv: 1.0e-200}", "generate: gap_cv: 1e-200 must be from"),
    ("generate: {kind: steady, alpha: 1000}", "generate: alpha: 1000 must be from 0"),
    ("rate_scale: 1.0e+30", "240 requests become more than the 20,000,000 that a trace may have"),
    ("models: [{name: a, share: .nan}]", "models[0].share: nan is not a finite number"),
    ("models: [{name: '', shape: Llama-3.2-1B}]", "models[0].name: must not be empty"),
    ("models: [{name: a, static_share: 0}]", "models[0].static_share: 0.0 is not in (0, 1]"),
    ("models: [{name: a, static_share: 1.5}]", "models[0].static_share: 1.5 is not in (0, 1]"),
    ("models: [{name: a, static_share: .nan}]", "models[0].static_share: nan is not a finite"),
    ("models: [{name: a, kv_reserve_tokens: -1}]", "models[0].kv_reserve_tokens: -1 must be"),
    ("engine: {headroom_tokens: -1}", "engine.headroom_tokens: -1 must be at least 0"),
    ("scheduler: {migration_threshold: -0.5}", "scheduler.migration_threshold: -0.5 must be at"),
    ("scheduler: {contended_requests: .nan}", "scheduler.contended_requests: nan is not a finite"),
    ("source: {format: csv}", "source: is of trace: FILE, and this trace is generated"),
    ("gpus: {1: 2}", "gpus.1: a key must be text"),
    (f"gpus: {'[' * 3000}", "values are nested too deeply"),
    ("models: &all [*all]", "values are nested too deeply"),
    ("policy: 2026-13-45", "a value cannot be read: month must be in 1..12"),
    (f"slo: {{ttft: {'9' * 400}s}}", "s' is out of range, such as 500ms"),
    (f"gpus: {{memory: {'9' * 400}GiB}}", "GiB' is out of range, such as 512MiB"),
    ("slo: {e2e: 5}", 'slo.e2e: expected `str`, got `int`; write it as "500ms"'),
)


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    *,
    text: str,
    message: str,
) -> None:
    key = text.partition(":")[0]
    kept = [old for old in CONFIG.splitlines() if not old.startswith(key + ":")]
    if key == "models":
        kept = [old for old in kept if not old.startswith("  -")]
    config.write_text("\n".join([*kept, text]))
    assert call(monkeypatch, "run", str(config)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert str(config) in said


OPTIONS = (
    (("run", "--seed", "-1"), "seed: -1 must be at least 0"),
    (("run", "--set", "generate.seconds=["), "--set 'generate.seconds=[': line 1, column 2"),
    (("trace", "stats", "t.jsonl", "--seconds", "nan"), "--seconds nan: must be above 0"),
    (("run", "--judge", "0"), "--judge '0': every scale must be above 0"),
    (("sweep", "--out", "o", "--vary", "seed=1", "--judge", "x"), "--judge 'x': write numbers"),
    (
        ("sweep", "--out", "o", "--vary", "gpus=1,2", "--vary", "gpus.count=3"),
        "--vary 'gpus.count=3': gpus.count is varied already",
    ),
    (("sweep", "--out", "o", "--vary", "rate_scale=[1"), "--vary 'rate_scale=[1': line 1"),
    (("trace", "generate", "--models", "a", "--out", "t", "--rate", "1e30"), "20,000,000 requests"),
    (
        ("trace", "generate", "--models", "a", "--out", "t", "--input-tokens", "nan:5"),
        "token counts 'nan:5', '211:1024': must be from 1",
    ),
    (("trace", "generate", "--models", "a:nan", "--out", "t"), "models: shares must be above 0"),
)


@pytest.mark.parametrize(("asked", "message"), OPTIONS)
def test_a_wrong_option_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    *,
    asked: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *asked) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_a_seed_below_0_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    given = ("--models", "a") if command == "generate" else ("t.jsonl",)
    assert call(monkeypatch, "trace", command, *given, "--seed", "-1", "--out", "u.jsonl") == 2
    assert "--seed" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_without_options_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "run", str(tmp_path / "no.yaml")) == 2
    said = capsys.readouterr().err
    assert "name a YAML file that is there" in said
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
    with pytest.raises(ConfigError, match=r"m\.share: is of generate\.kind"):
        load(config, {"models": shares, "generate": steady})


def slos_e2e_s(config: Path, changes: dict[str, Any]) -> dict[str, set[float]]:
    """End-to-end SLOs of the requests, by model."""
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


def line(timestamp: int, model: str = "a", prompt: int = 1) -> str:
    return json.dumps(
        {"timestamp": timestamp, "model": model, "input_length": prompt, "output_length": 1}
    )


TRACES = (
    ("", "the trace is empty"),
    (line(5, model="x"), "request 1: model: 'x'"),
    (line(5, prompt=0), ":1: input_length"),
    (line(5, prompt=2**31), "request 1: input_length: 2147483648 must be at most 2147483647"),
    (line(5).replace('"output_length": 1', '"output_length": 0'), ":1: output_length"),
    (line(-5), ":1: timestamp"),
    (f"{line(5)}\n{line(4)}", ":2: timestamp: 4 is before"),
)


@pytest.mark.parametrize(("content", "message"), TRACES)
def test_a_bad_trace_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    *,
    content: str,
    message: str,
) -> None:
    (config.parent / "bad.jsonl").write_text(content)
    config.write_text(CONFIG.replace("generate: {seconds: 60, rate: 4}", "trace: bad.jsonl"))
    assert call(monkeypatch, "run", str(config)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


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


@pytest.mark.parametrize(
    ("asked", "module"),
    [
        (("study", "prism-table1", "--out", "x"), "papers"),
        (("parity", "--config", "x.yaml"), "tools.parity"),
        (("calibrate", "validate"), "tools.costs.validate"),
    ],
)
def test_commands_that_moved_name_their_place(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: tuple[str, ...],
    module: str,
) -> None:
    assert call(monkeypatch, *asked) == 2
    assert capsys.readouterr().err.endswith(f"in a checkout: python -m {module}\n")
