"""The page about a trace, and the commands on traces with all their options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.main import get_group

from prism.cli.exit_codes import run
from prism_replay.cli.replay import app
from prism_replay.cli.trace_commands import commands
from prism_replay.formats.reader import read_format
from prism_replay.generators.base import generate
from prism_replay.generators.kinds import config_of_preset
from prism_replay.report.stats import describe
from prism_replay.report.trace_page import comparison_rows, model_cells, render
from prism_replay.trace import models_of, read_trace, write_trace
from tests.replay.records import a_request
from tests.replay.test_report import Page

TRACE = generate(config_of_preset("novita", None, {"seconds": 7200.0}))


def cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app([str(argument) for argument in arguments]), "prism-replay")
    return int(ended.value.code or 0)


def test_the_page_holds_figures_and_numbers_and_fetches_nothing() -> None:
    html = render("novita.jsonl", TRACE, describe(TRACE, 7200.0))
    page = Page(html)
    assert all(reference.startswith("#") for reference in page.loads)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert len(page.ids) == len(set(page.ids))
    for plot in ("popularity", "idle", "idles", "cv", "active", "rates", "lengths", "gaps"):
        assert f"plot-{plot}" in page.ids
    assert "mathdefault" not in html
    assert html == render("novita.jsonl", TRACE, describe(TRACE, 7200.0))
    assert len(re.findall(r"<td>model-\d+</td>", html)) == 16


def test_figures_without_data_are_left_out() -> None:
    lone = [a_request(0.0)]
    page = Page(render("<one>", lone, describe(lone, 5.0)))
    assert "plot-idle" not in page.ids
    assert "plot-lengths" in page.ids


def test_published_values_stand_beside_ours() -> None:
    rows = {label: (here, there) for label, here, there in comparison_rows(describe(TRACE, 7200.0))}
    assert rows["requests from the last 60 % of models"] == ("25.1 %", "about 25 %")
    assert rows["correlation of a model's days"] == ("-", "near 0")
    assert len(rows) == 12


def test_a_coefficient_that_is_not_defined_is_a_dash_everywhere() -> None:
    short = [a_request(second) for second in (0.0, 7.0, 30.0)]
    stats = describe(short, 60.0)
    assert model_cells(stats.models[0])[3] == "-"
    rows = {label: here for label, here, _ in comparison_rows(stats)}
    assert rows["models with CV of req/min above 0.5"] == "-"
    assert rows["models with CV of req/min above 1"] == "-"


def test_stats_say_what_idle_and_active_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, html = tmp_path / "t.jsonl", tmp_path / "s.html"
    write_trace(path, [a_request(0.0), a_request(30.0)])
    assert cli("stats", path, "--html", html) == 0
    for shown in (capsys.readouterr().out, Page(html.read_text()).text):
        text = " ".join(shown.split())
        assert "idle: part of the time in gaps of more than 10 s between requests" in text
        assert "active: part of the time with a request in the last 2 minutes" in text
        assert "-: not defined" in text


def test_stats_writes_json_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, html = tmp_path / "t.jsonl", tmp_path / "s.json", tmp_path / "s.html"
    write_trace(path, TRACE)
    options = ["--start", 600, "--window", 1800, "--seconds", 1800, "--json", out, "--html", html]
    assert cli("stats", path, *options) == 0
    found = json.loads(out.read_text())
    inside = [request for request in TRACE if 600 <= request.arrival_s < 2400]
    assert (found["requests"], found["duration_s"]) == (len(inside), 1800.0)
    assert "<html" in html.read_text()
    assert "changes of the active set per hour" in capsys.readouterr().out


def test_presets_and_kinds_are_generated(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    assert cli("generate", "--preset", "novita", "--seconds", 600, "--out", out) == 0
    assert len(models_of(read_trace(out))) == 16
    names = ",".join(f"n{rank}" for rank in range(16))
    options = ["--preset", "novita", "--models", names, "--rate", 0.1, "--seconds", 600]
    assert cli("generate", *options, "--out", out) == 0
    assert (models_of(read_trace(out))[0], len(read_trace(out))) == ("n0", 60)
    kinds = {"bursty": [], "steady": ["--alpha", 2.1, "--gap-cv", 3], "production": ["--gap-cv", 1]}
    for kind, options in kinds.items():
        arguments = ["--kind", kind, "--models", "a,b", "--rate", 0.5, *options]
        assert cli("generate", *arguments, "--slo", "b=100/10", "--out", out) == 0
        found = {request.model: request.slo_ttft_ms for request in read_trace(out)}
        assert found == {"a": 2000.0, "b": 100.0}


def test_lengths_come_from_another_trace(tmp_path: Path) -> None:
    source, out = tmp_path / "lengths.csv", tmp_path / "t.jsonl"
    source.write_text("num_prefill_tokens,num_decode_tokens\n77,88\n")
    arguments = ["--models", "a", "--seconds", 100, "--lengths", f"vidur={source}"]
    assert cli("generate", *arguments, "--out", out) == 0
    assert {(r.input_length, r.output_length) for r in read_trace(out)} == {(77, 88)}


def test_convert_samples_maps_windows_and_writes_mooncake(tmp_path: Path) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "{model}.jsonl"
    write_trace(path, TRACE)
    options = ["--sample-models", 4, "--start", 60, "--window", 3600, "--to", "mooncake"]
    assert cli("convert", path, *options, "--models", "x,y", "--map", "round-robin") == 2
    mapped = [*options, "--models", "x,y", "--map", "round-robin", "--out", out]
    assert cli("convert", path, *mapped) == 0
    found = {name: read_format(tmp_path / f"{name}.jsonl", "mooncake") for name in ("x", "y")}
    assert all(found.values())
    assert cli("convert", path, "--only", "model-3", "--out", tmp_path / "o.jsonl") == 0
    assert models_of(read_trace(tmp_path / "o.jsonl")) == ["model-3"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--kind", "odd"], "--kind 'odd'"),
        (["generate", "--kind", "steady"], "--models"),
        (["generate", "--preset", "x"], "preset 'x'"),
        (
            ["generate", "--preset", "novita", "--models", "a"],
            "novita needs 16 models, not 1",
        ),
        (["generate", "--models", "a", "--lengths", "x"], "--lengths 'x'"),
        (["generate", "--models", "a", "--lengths", "odd=x"], "format 'odd'"),
        (["generate", "--models", "a", "--slo", "x=1/1"], "'x'"),
        (["convert", "t.jsonl", "--only", "a,"], "--only 'a,'"),
        (["convert", "t.jsonl", "--only", "z"], "model 'z'"),
        (["convert", "t.jsonl", "--models", "a", "--map", "odd"], "--map 'odd'"),
        (["convert", "t.jsonl", "--to", "odd"], "--to 'odd'"),
        (["convert", "t.jsonl", "--sample-models", "99"], "sample of 99"),
        (["convert", "t.jsonl", "--thin", "2"], "thin"),
        (["convert", "t.jsonl", "--window", "0"], "window"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "t.jsonl", TRACE[:50])
    assert cli(*arguments, "--out", "out.jsonl") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert not (tmp_path / "out.jsonl").exists()


def test_both_commands_offer_the_same() -> None:
    shared = set(get_group(commands("prism-sim trace")).commands)
    assert shared == {"generate", "stats", "convert"}
    assert shared < set(get_group(app).commands)
