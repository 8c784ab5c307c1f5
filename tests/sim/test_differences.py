"""Differences between policies over common seeds, and the rows of single seeds, as `run`, `sweep`,
`plan` and `compare` have them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import fmean

import pytest

from prism.errors import ConfigError
from prism_replay.intervals import interval
from prism_sim import Results, compare
from tests.sim.command import call

CONFIG = """
gpus: {type: h100, count: 1, memory: 40GiB}
models: [{name: a, shape: Llama-3.1-8B}, {name: b, shape: Llama-3.2-1B}]
slo: {ttft: 40ms, tpot: 9ms}
generate: {seconds: 20, rate: 6}
seed: 5
"""
SEEDS = ("--seeds", "3")
Rows = list[dict[str, str]]
VALUES = ("attainment_ttft", "attainment_all", "ttft_p99_ms", "busy")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


def rows_of(path: Path) -> Rows:
    return list(csv.DictReader(path.read_text().splitlines()))


def check_pairs(seeds: Rows, differences: Rows, against: str) -> None:
    """Checks each difference against the rows of its pairs of runs."""
    for found in differences:
        assert found["against"] == against != found["policy"]
        same = {key: found[key] for key in ("gpus", "rate_scale", "judged_at") if key in found}
        chosen = [row for row in seeds if same.items() <= row.items()]
        own, other = (
            {row["seed"]: row for row in chosen if row["policy"] == policy}
            for policy in (found["policy"], against)
        )
        assert list(own) == list(other) == ["5", "6", "7"]
        for name in VALUES:
            pairs = [float(own[seed][name]) - float(other[seed][name]) for seed in own]
            mean, half = interval(pairs)
            assert float(found[name]) == pytest.approx(mean)
            assert float(found[f"{name}_ci95"]) == pytest.approx(half)


def test_run_compares_policies_over_seeds(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    given = ("--policies", "prism,static,qlm", "--against", "static", "--judge", "0.5,1")
    assert call(monkeypatch, "run", str(config), *given, *SEEDS, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "Difference from static over common seeds" in shown
    seeds, differences = rows_of(out / "seeds.csv"), rows_of(out / "differences.csv")
    assert len(seeds) == 3 * 3 * 2
    assert [(row["policy"], row["judged_at"]) for row in differences] == (
        [(policy, scale) for policy in ("prism", "qlm") for scale in ("0.5", "1")]
    )
    check_pairs(seeds, differences, "static")
    assert any(float(row["attainment_all_ci95"]) > 0 for row in differences)
    (shown_prism,) = [row for row in differences if row["judged_at"] == "1"][:1]
    mean, half = (100 * float(shown_prism[f"attainment_all{end}"]) for end in ("", "_ci95"))
    assert f"{mean:+.2f} ± {half:.2f}" in shown
    assert "Differences from static over common seeds" in (out / "report.html").read_text()
    for row in rows_of(out / "run.csv"):
        own = [s for s in seeds if (s["policy"], s["judged_at"]) == (row["policy"], "1")]
        if row["judged_at"] == "1":
            assert float(row["busy"]) == pytest.approx(fmean(float(s["busy"]) for s in own))
    requests = rows_of(out / "qlm" / "seed-6" / "requests.csv")
    (one,) = [s for s in seeds if (s["policy"], s["seed"], s["judged_at"]) == ("qlm", "6", "1")]
    met = fmean(row["met_ttft"] == "true" for row in requests)
    assert met == pytest.approx(float(one["attainment_ttft"]))


def test_sweep_and_api_have_what_run_has(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    common = (str(config), *SEEDS, "--against", "static")
    run, swept = tmp_path / "run", tmp_path / "sweep"
    assert call(monkeypatch, "run", *common, "--policies", "prism,static", "--out", str(run)) == 0
    vary = ("--vary", "policy=prism,static", "--vary", "rate_scale=1,2", "--jobs", "1")
    assert call(monkeypatch, "sweep", *common, *vary, "--out", str(swept)) == 0
    check_pairs(rows_of(swept / "seeds.csv"), rows_of(swept / "differences.csv"), "static")
    assert len(rows_of(swept / "differences.csv")) == 2
    kept: dict[tuple[str, int], Results] = {}
    found = compare(
        config,
        ["prism", "static"],
        range(5, 8),
        against="static",
        on_run=lambda policy, seed, results: kept.update({(policy, seed): results}),
    )
    found.write(tmp_path / "api", "prism, static")
    for name in ("run.json", "run.csv", "seeds.csv", "differences.csv", "report.html"):
        assert (tmp_path / "api" / name).read_bytes() == (run / name).read_bytes()
    for name, frame in (("run", found.means), ("seeds", found.seeds)):
        rows = rows_of(run / f"{name}.csv")
        assert frame["attainment_all"].to_list() == [float(row["attainment_all"]) for row in rows]
    assert found.differences["policy"].to_list() == ["prism"]
    assert len(kept) == 6
    assert kept["static", 6].requests["met_ttft"].mean() == found.seeds["attainment_ttft"][4]
    for name in ("seeds.csv", "differences.csv"):
        rows, own = rows_of(swept / name), rows_of(run / name)
        for row in rows:
            assert row.pop("rate_scale") in ("1", "2")
        assert all(row in rows for row in own)


def test_a_plan_compares_policies_with_as_many_gpus(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    given = ("--policies", "prism,static", "--max-gpus", "2", "--target", "0.9", *SEEDS)
    for jobs in ("1", "2"):
        out = ("--jobs", jobs, "--out", str(tmp_path / jobs))
        assert call(monkeypatch, "plan", str(config), *given, "--metric", "all", *out) == 0
    assert "Difference from prism" in capsys.readouterr().out
    seeds, differences = (rows_of(tmp_path / "1" / f"{n}.csv") for n in ("seeds", "differences"))
    check_pairs(seeds, differences, "prism")
    tried = {row["gpus"] for row in seeds if row["policy"] == "prism"}
    assert "1" in {row["gpus"] for row in differences} <= tried
    for name in ("seeds.csv", "differences.csv", "plan.json", "report.html"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_pairs_have_narrower_intervals_than_their_values(config: Path) -> None:
    """Compares two policies that the load of each seed's trace affects alike."""
    found = compare(config, ["prism", "static"], range(6), changes={"gpus.memory": "24GiB"})
    (paired,) = found.difference_rows()
    separate = math.hypot(*found.means["attainment_all_ci95"])
    assert 0 < paired["attainment_all_ci95"] < separate / 2


def test_a_single_seed_has_no_differences(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    vary = ("--vary", "policy=prism,static", "--jobs", "1", "--out", str(tmp_path / "out"))
    assert call(monkeypatch, "sweep", str(config), *vary, "--seeds", "2") == 0
    assert (tmp_path / "out" / "differences.csv").exists()
    assert call(monkeypatch, "sweep", str(config), *vary) == 0
    assert not (tmp_path / "out" / "differences.csv").exists()
    assert [row["policy"] for row in rows_of(tmp_path / "out" / "seeds.csv")] == ["prism", "static"]


def test_a_policy_that_cannot_run_has_its_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: Path,
    tmp_path: Path,
) -> None:
    vary = ("--vary", "policy=prism,static", "--vary", "gpus.memory=4GiB,40GiB", "--jobs", "1")
    out = tmp_path / "out"
    assert call(monkeypatch, "sweep", str(config), *vary, *SEEDS, "--out", str(out)) == 0
    assert "use GPUs with more memory" in capsys.readouterr().out
    small, large = rows_of(out / "differences.csv")
    assert "use GPUs with more memory" in small["problem"]
    assert large["problem"] == ""
    assert (
        sum("use GPUs with more memory" in row["problem"] for row in rows_of(out / "seeds.csv"))
        == 6
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("run", "--policies", "prism,static", "--against", "qlm", *SEEDS),
            "--against qlm: is not one of several policies to compare; these are prism, static",
        ),
        (
            ("run", "--policies", "prism,static", "--against", "static"),
            "--against static: needs at least two seeds; add --seeds 5",
        ),
        (
            ("sweep", "--vary", "rate_scale=1,2", "--against", "prism", *SEEDS, "--out", "{out}"),
            "--against prism: is not one of several policies to compare; these are not varied",
        ),
        (("run", "--seeds", "0"), "--seeds 0: must be >= 1"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    given = (argument.replace("{out}", str(tmp_path)) for argument in arguments)
    assert call(monkeypatch, *given) == 2
    assert says in capsys.readouterr().err


def test_mistakes_of_the_api(config: Path) -> None:
    with pytest.raises(ConfigError, match="against: 'qlm' is not one of prism"):
        compare(config, ["prism"], [1], against="qlm")
    with pytest.raises(ConfigError, match="policies and seeds"):
        compare(config, [], [1])
