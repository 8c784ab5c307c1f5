"""Sweeps and plans: the same bytes on any number of cores, and no point twice."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import ConfigError
from prism_replay.outcomes import PointOutcome
from prism_replay.results import Attainment, GroupSummary, Latency, Summary
from prism_sim.cli import sweep as sweep_cli
from prism_sim.cli.sweep import parse_vary
from prism_sim.cluster.world import World
from prism_sim.sweeps import planning, points
from prism_sim.sweeps.pages import plan_page_table, write_plans
from prism_sim.sweeps.planning import CapacityPlan, fewest_gpus, plan_goal
from prism_sim.sweeps.points import Point, Store, grid, run_points
from tests.sim.command import call

CONFIG = """
gpus: {type: h100, count: 1, memory: 40GiB}
models: [{name: a, shape: Llama-3.1-8B}, {name: b, shape: Llama-3.2-1B}]
generate: {seconds: 30, rate: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


def outcome(attainment: float) -> PointOutcome:
    part = Attainment(1, ttft=attainment)
    none = Latency()
    total = GroupSummary(1, 1, {}, 1, 1, none, none, none, {"1": part})
    return PointOutcome({}, Summary(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, total, {}))


def run_listed(listed: list[Point], store: Store[PointOutcome]) -> list[PointOutcome]:
    return run_points(
        listed, points.simulate, jobs=1, store=store, progress=lambda done, total: None
    )


def test_any_number_of_cores_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    for jobs in ("1", "2"):
        vary = ("--vary", "policy=prism,static", "--vary", "rate_scale=0.5,1")
        command = ("sweep", str(config), *vary, "--out", str(tmp_path / jobs), "--jobs", jobs)
        assert call(monkeypatch, *command) == 0
    for name in ("sweep.json", "sweep.csv", "report.html"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert len((tmp_path / "1" / "sweep.csv").read_text().splitlines()) == 5


def test_what_is_there_is_not_simulated_again(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    listed = [Point(str(config), changes) for changes in grid({"rate_scale": [0.5, 1]})]
    store = Store(tmp_path / "points", PointOutcome)
    first = run_listed(listed[:1], store)
    simulated = []
    real = points.simulate
    monkeypatch.setattr(points, "simulate", lambda p: simulated.append(p) or real(p))
    both = run_listed(listed, store)
    assert simulated == listed[1:]
    assert msgspec.json.encode(both[0]) == msgspec.json.encode(first[0])
    config.write_text(CONFIG.replace("rate: 2", "rate: 3"))
    run_listed(listed[:1], store)
    assert simulated == [listed[1], listed[0]]


def test_a_point_that_cannot_be_is_an_outcome(config: Path) -> None:
    found = points.simulate(Point(str(config), {"gpus.memory": "8GiB"}))
    assert found.summary is None
    assert "use GPUs with more memory" in found.problem
    assert found.attainment("ttft", "1") == 0.0


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_fewest_gpus_are_found(needed: int, most: int) -> None:
    asked: list[int] = []

    def simulate(gpus: int) -> list[PointOutcome]:
        asked.append(gpus)
        return [outcome(1.0 if gpus >= needed else 0.5)]

    found = fewest_gpus("prism", target=0.99, metric="ttft", most=most, simulate=simulate)
    assert found.gpus == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 2


def test_plan_writes_what_it_tried_whatever_the_cores(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    for jobs in ("1", "2"):
        given = ("--policies", "prism,static", "--max-gpus", "2", "--jobs", jobs)
        assert call(monkeypatch, "plan", str(config), *given, "--out", str(tmp_path / jobs)) == 0
    for name in ("plan.json", "plan.csv", "report.html"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    rows = (tmp_path / "1" / "plan.csv").read_text().splitlines()
    assert rows[1].startswith("prism,1,1.0,ttft,0.99,1,")


@pytest.mark.parametrize(("seeds", "hints"), [("1", True), ("2", False)])
def test_a_plan_of_one_seed_hints_at_more(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    *,
    seeds: str,
    hints: bool,
) -> None:
    given = ("--policies", "prism", "--max-gpus", "1", "--seeds", seeds, "--jobs", "1")
    assert call(monkeypatch, "plan", str(config), *given) == 0
    shown = capsys.readouterr()
    assert ("--seeds 5" in shown.out) == hints
    assert "simulating 1 GPU\n" in shown.err


def a_plan(metric: str, tried: dict[int, float], gpus: int | None) -> CapacityPlan:
    at = tried[gpus or max(tried)]
    return CapacityPlan("prism", gpus, at, 0.995, metric, tried)


def test_the_page_of_a_plan_names_what_it_tried(tmp_path: Path) -> None:
    found = a_plan("ttft", {2: 1.0, 1: 0.7192}, 2)
    assert plan_goal(found) == "99.5 % of requests within their TTFT SLO"
    table = plan_page_table([found, a_plan("ttft", {1: 0.5}, None)])
    assert table.rows == [
        ("prism", "2", "100.0 %", "1 GPU: 71.9 %, 2 GPUs: 100.0 %"),
        ("prism", "more than 1", "50.0 %", "1 GPU: 50.0 %"),
    ]
    write_plans(tmp_path, [found], [], "t")
    (svg,) = re.findall(r'<svg class="wide".*?</svg>', (tmp_path / "report.html").read_text(), re.S)
    ticks = re.findall(r"<text[^>]*>([\d.]+)</text>", svg)
    assert {"1", "2"} <= set(ticks)
    assert not [tick for tick in ticks if "." in tick]


def test_a_plan_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    search = planning.Search(str(config), {}, "prism", 0.99, "ttft", 2, tmp_path)
    first = planning.plan_one(search)
    monkeypatch.setattr(planning, "simulate", lambda point: pytest.fail("simulated again"))
    assert planning.plan_one(search) == first


def test_sweep_and_plan_have_the_bundled_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    short = ("--set", "generate.seconds=5", "--jobs", "1")
    vary = ("--vary", "policy=static", "--out", str(tmp_path))
    assert call(monkeypatch, "sweep", *vary, *short) == 0
    assert call(monkeypatch, "plan", "--policies", "static", "--max-gpus", "2", *short) == 0
    assert "static" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "{config}", "--vary", "rate_scale", "--out", "{out}"),
        ("sweep", "{config}", "--vary", "speed=1", "--out", "{out}"),
        ("plan", "{config}", "--policies", "magic"),
        ("plan", "{config}", "--max-gpus", "0"),
        ("run", "{config}", "--gpus", "0"),
        ("run", "{config}", "--set", "models.0.tp=2"),
        ("plan", "{config}", "--metric", "joy"),
        ("run", "{config}", "--set", "policy"),
        ("run", "{config}", "--timeline"),
    ],
)
def test_mistakes_end_with_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
) -> None:
    filled = [a.format(config=config, out=tmp_path / "out") for a in arguments]
    assert call(monkeypatch, *filled) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_file_is_not_a_mistake_of_a_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "none.yaml")
    assert call(monkeypatch, "plan", file) == 2
    said = capsys.readouterr().err
    assert f"{file}: cannot be read: No such file or directory" in said
    assert "(at " not in said


def never(point: Point) -> PointOutcome:
    pytest.fail(f"simulated {point}")


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ("policy=prism,foo", "policy: 'foo' is not a policy"),
        ("gpus=2,0", "gpus.count: 0 GPUs"),
        ("rate_scale=1,fast", "(at rate_scale=fast)"),
        ("slo_scale=1,-1", "slo_scale: -1 must be > 0"),
        ("slo.ttft=1s,soon", "slo.ttft: 'soon' is not a time"),
        ("generate.rate=1,0", "rate: 0 must be > 0"),
    ],
)
def test_a_mistake_in_a_later_point_ends_a_sweep_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    *,
    vary: str,
    says: str,
) -> None:
    monkeypatch.setattr(sweep_cli, "simulate", never)
    given = ("--vary", vary, "--out", str(tmp_path / "out"), "--jobs", "1")
    assert call(monkeypatch, "sweep", str(config), *given) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said
    assert f"{sweep_cli.parse_vary(vary)[0]}={vary.rpartition(',')[2]}" in said


def test_a_plan_refuses_what_one_of_its_policies_cannot_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    monkeypatch.setattr(planning, "simulate", never)
    reuse = ("--policies", "prism,seallm", "--set", "engine.prefix_reuse=true")
    assert call(monkeypatch, "plan", str(config), *reuse) == 2
    assert "engine.prefix_reuse: cannot be combined with policy 'seallm'" in capsys.readouterr().err


def test_a_model_too_large_for_its_gpu_stays_the_outcome_of_a_point(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    given = ("--vary", "gpus.memory=40GiB,8GiB", "--out", str(tmp_path), "--jobs", "1")
    assert call(monkeypatch, "sweep", str(config), *given) == 0
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [bool(row["problem"]) for row in rows] == [False, True]
    large = ("--set", "gpus.memory=1GiB", "--policies", "static")
    assert call(monkeypatch, "plan", str(config), *large) == 2
    assert "use GPUs with more memory" in capsys.readouterr().err


def test_too_few_gpus_for_a_policy_stay_the_outcome_of_a_point(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    vary = ("--vary", "policy=prism,aegaeon", "--vary", "gpus=1,2")
    given = (*vary, "--out", str(tmp_path), "--jobs", "1")
    assert call(monkeypatch, "sweep", str(config), *given) == 0
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [bool(row["problem"]) for row in rows] == [False, False, True, False]
    assert "policy 'aegaeon' prefills and decodes on different GPUs" in rows[2]["problem"]


def test_a_plan_goes_on_where_a_policy_has_too_few_gpus(config: Path) -> None:
    found = planning.plan_one(planning.Search(str(config), {}, "aegaeon", 0.01, "ttft", 4))
    assert found.gpus == 2
    assert found.tried[1] == 0.0


def test_a_pin_on_a_gpu_that_a_point_lacks_is_its_outcome(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    config.write_text(CONFIG.replace("name: b", "name: b, device: 'gpu:1'"))
    given = ("--vary", "gpus=1,2", "--out", str(tmp_path), "--jobs", "1")
    assert call(monkeypatch, "sweep", str(config), *given) == 0
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert "models[1].device: 'gpu:1' does not exist; the GPUs are gpu:0" in rows[0]["problem"]
    assert not rows[1]["problem"]
    found = planning.plan_one(planning.Search(str(config), {}, "prism", 0.5, "ttft", 2))
    assert (found.gpus, found.tried[1]) == (2, 0.0)
    assert call(monkeypatch, "plan", str(config), "--max-gpus", "1") == 2
    pin = ("--set", "models=[{name: a, shape: Llama-3.1-8B, device: ''}]")
    assert call(monkeypatch, "sweep", str(config), *given, *pin) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("run", "--policies", "static,aegaeon"), "gpus.count: must be >= 2"),
        (("run", "--policies", "static,aegaeon", "--set", "engine.prefix_reuse=true"), "reuse"),
        (("plan", "--policies", "prism,aegaeon", "--max-gpus", "1"), "gpus.count: must be >= 2"),
        (("sweep", "--vary", "policy=prism,aegaeon", "--set", "engine.prefix_reuse=true"), "reuse"),
        (("plan", "--policies", "prism,aegaeon", "--max-gpus", "5"), "gpus.count: must be >= 6"),
    ],
)
def test_what_a_later_policy_cannot_do_is_said_before_anything_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
    *,
    given: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setattr(World, "run", lambda self: pytest.fail("simulated"))
    if ">= 6" in says:
        config.write_text(CONFIG.replace("Llama-3.2-1B", "Llama-3.2-1B, tp: 2"))
    command, *options = given
    out = tmp_path / "out"
    assert call(monkeypatch, command, str(config), *options, "--out", str(out)) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == []


def test_values_are_yaml() -> None:
    assert parse_vary("gpus=1,2") == ("gpus.count", [1, 2])
    assert parse_vary("engine.mixed_chunk=true,false") == ("engine.mixed_chunk", [True, False])
    with pytest.raises(ConfigError):
        parse_vary("gpus")


def test_a_sweep_writes_tables_of_requests(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    """Compares each point's table with that of a run; an interrupted sweep writes the rest."""
    out, run = tmp_path / "out", tmp_path / "run"
    vary = ("--vary", "policy=prism,static", "--seeds", "2", "--set", "rate_scale=2")
    command = ("sweep", str(config), *vary, "--out", str(out))
    assert call(monkeypatch, *command, "--jobs", "2") == 0
    assert not list(out.rglob("requests.csv"))
    assert call(monkeypatch, *command, "--requests", "--jobs", "2") == 0
    both = ("--policies", "prism,static", "--seeds", "2", "--rate-scale", "2")
    assert call(monkeypatch, "run", str(config), *both, "--out", str(run)) == 0
    rows = list(csv.DictReader((out / "seeds.csv").read_text().splitlines()))
    assert len({row["requests"] for row in rows}) == 4
    for row in rows:
        whole = run / row["policy"] / f"seed-{row['seed']}" / "requests"
        for end in (".csv", ".parquet"):
            table = (out / row["requests"]).with_suffix(end)
            assert table.read_bytes() == whole.with_suffix(end).read_bytes()
    lost = out / rows[1]["requests"]
    lost.unlink()
    simulated = []
    real = points.simulate
    monkeypatch.setattr(sweep_cli, "simulate", lambda p: simulated.append(p) or real(p))
    assert call(monkeypatch, *command, "--requests", "--jobs", "1") == 0
    assert lost.exists()
    assert [point.changes["seed"] for point in simulated] == [1]
    assert call(monkeypatch, *command, "--jobs", "1") == 0
    assert len(simulated) == 1


def test_a_plan_writes_tables_of_requests(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    given = ("plan", str(config), "--policies", "prism", "--max-gpus", "2", "--jobs", "1")
    assert call(monkeypatch, *given, "--requests") == 2
    assert "--requests needs --out FOLDER" in capsys.readouterr().err
    assert call(monkeypatch, *given, "--requests", "--out", str(tmp_path)) == 0
    (row,) = csv.DictReader((tmp_path / "seeds.csv").read_text().splitlines())
    table = list(csv.DictReader((tmp_path / row["requests"]).read_text().splitlines()))
    met = sum(request["met_ttft"] == "true" for request in table) / len(table)
    assert met == pytest.approx(float(row["attainment_ttft"]))
