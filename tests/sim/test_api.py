"""`prism_sim` as a Python API: the calls of notebooks, and the tables that it returns."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import prism_sim
from prism.errors import ConfigError, TraceError
from prism.policies import static
from prism.policies.policy import KV_LIMIT, Policy
from prism_replay.trace import TraceRequest
from prism_sim import Results, simulate, to_pandas
from prism_sim.output import tables
from prism_sim.output.tables import TABLES

ROOT = Path(__file__).parent.parent.parent
SETUP: dict[str, Any] = {
    "gpus": {"type": "h100", "count": 2, "memory": "40GiB"},
    "models": [
        {"name": "a", "shape": "Llama-3.1-8B"},
        {"name": "b", "shape": "Llama-3.2-1B", "count": 3},
    ],
    "slo": {"ttft": "100ms", "tpot": "10ms"},
    "generate": {"seconds": 60, "rate": 8},
}
ROWS = [
    {"timestamp": 100.0 * i, "model": "a", "input_length": 50 + i, "output_length": 9}
    for i in range(40)
]


@pytest.fixture(scope="module")
def results() -> Results:
    return simulate(SETUP, judge=(0.5, 1.0))


def test_the_api_is_what_it_was() -> None:
    """Pins names that notebooks use."""
    assert prism_sim.__all__ == ["Comparison", "Results", "compare", "simulate", "to_pandas"]
    parameters = ["setup", "trace", "changes", "policy", "judge", "progress"]
    assert list(inspect.signature(simulate).parameters) == parameters
    public = {name for name in vars(Results) if not name.startswith("_")}
    assert public == {"config", "summary", "found", "replay", "write", *TABLES}
    columns = {name: [c.name for c in table.columns] for name, table in TABLES.items()}
    assert columns["requests"][:7] == (
        ["index", "model", "device", "arrival_s", "started_s", "first_token_s", "end_s"]
    )
    assert columns["decisions"] == ["time_s", "kind", "model", "device", "target", "reason"]
    assert columns["devices"][:5] == ["device", "node", "capacity_bytes", "peak_bytes", "busy"]
    assert {"model", "slo_scale", "attainment_all", "ttft_ms_p99"} <= set(columns["models"])


def test_tables_agree_with_the_summary(results: Results) -> None:
    summary = results.summary
    for name, group in summary.groups.items():
        own = results.requests
        if name != "total":
            own = own.filter(pl.col("model") == name)
        part = group.attainment["1"]
        for metric in ("ttft", "tpot", "e2e"):
            assert own[f"met_{metric}"].mean() == pytest.approx(getattr(part, metric))
        assert own["ttft_s"].mean() == pytest.approx((group.ttft_ms.mean or 0) / 1000)
        row = results.models.filter((pl.col("model") == name) & (pl.col("slo_scale") == 0.5))
        assert row["attainment_all"].to_list() == [group.attainment["0.5"].all]
        assert row["output_tokens"].to_list() == [own["output_tokens"].sum()]
    assert results.devices["requests"].sum() == summary.total.requests
    assert results.devices["output_tokens"].sum() == summary.total.output_tokens
    made = results.found.decisions
    assert results.decisions["reason"].to_list() == [d.reason for d in made]
    for name in ("device", "target"):
        places = [getattr(decision, name) or None for decision in made]
        assert None in places or name == "device"
        assert results.decisions[name].to_list() == places
    known = {*results.models["costs"].drop_nulls()}
    assert all("aiconfigurator" in source for source in known)


def test_what_never_happened_is_null(tmp_path: Path) -> None:
    """Runs a policy that places no model: nothing starts."""
    nowhere = Policy("nowhere", lambda view, settings: (), frozenset())
    found = simulate(SETUP, ROWS, policy=nowhere)
    assert found.config.policy == "nowhere"
    assert found.requests["error"].unique().to_list() == ["unserved"]
    for column in ("device", "started_s", "first_token_s", "ttft_s", "tpot_s", "e2e_s"):
        assert found.requests[column].null_count() == len(ROWS)
    assert not found.requests["met_ttft"].any()
    assert found.decisions.is_empty()
    assert found.decisions.schema["time_s"] == pl.Float64
    found.write(tmp_path)
    first = next(csv.DictReader((tmp_path / "requests.csv").read_text().splitlines()))
    assert (first["device"], first["ttft_s"], first["error"]) == ("", "", "unserved")


def test_what_a_policy_of_others_raises_has_its_name() -> None:
    faulty = Policy("faulty", lambda view, settings: {}["gpu:99"], frozenset())
    with pytest.raises(KeyError, match="gpu:99") as caught:
        simulate(SETUP, ROWS, policy=faulty)
    assert caught.value.__notes__ == ["the policy was 'faulty'"]


def test_csv_and_parquet_hold_the_same(results: Results, tmp_path: Path) -> None:
    results.write(tmp_path / "one", timeline=True)
    results.write(tmp_path / "two", timeline=True)
    for name in TABLES:
        frame = pl.read_parquet(tmp_path / "one" / f"{name}.parquet")
        assert frame.equals(getattr(results, name))
        text = (tmp_path / "one" / f"{name}.csv").read_text()
        read = pl.read_csv(io.StringIO(text), schema=frame.schema)
        assert read.equals(frame.with_columns(pl.col(pl.String).replace("", None)))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_long_csv_is_written_in_parts(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for rows in (1 << 16, 7):
        monkeypatch.setattr(tables, "CSV_ROWS", rows)
        results.write(tmp_path)
        texts.append((tmp_path / "requests.csv").read_text())
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == len(results.requests) + 1


def test_a_setup_is_a_file_or_its_keys(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(SETUP))
    for setup in (path, str(path)):
        again = simulate(setup, judge=(0.5, 1.0))
        assert again.requests.equals(results.requests)
    changed = simulate(SETUP, changes={"gpus.count": 1, "policy": "static"})
    assert len(changed.devices) == 1
    assert SETUP["gpus"]["count"] == 2


def test_a_trace_is_a_file_or_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    of_rows = simulate(SETUP, ROWS)
    assert of_rows.requests["prompt_tokens"].to_list() == [row["input_length"] for row in ROWS]
    assert simulate(SETUP, path).requests.equals(of_rows.requests)
    twice = simulate(SETUP, ROWS, changes={"rate_scale": 2})
    assert len(twice.requests) == 80


def test_a_policy_needs_no_package() -> None:
    mine = Policy("mine", static.plan, frozenset({KV_LIMIT}), evicts=False)
    ours, theirs = simulate(SETUP, policy=mine), simulate(SETUP, changes={"policy": "static"})
    assert ours.requests["end_s"].equals(theirs.requests["end_s"])


@pytest.mark.parametrize(
    ("setup", "trace", "says"),
    [
        ({**SETUP, "gpu": {}}, None, "setup: gpu: unknown key; did you mean 'gpus'"),
        (SETUP, [{**ROWS[0], "input_length": 0}], r"trace\[0\]\.input_length: expected `int` >= 1"),
        (SETUP, [{**ROWS[0], "timestamp": float("inf")}], r"trace\[0\]\.timestamp: inf is not"),
        (SETUP, [TraceRequest(**{**ROWS[0], "timestamp": float("nan")})], "timestamp: nan is not"),
        (SETUP, [{**ROWS[0], "output_length": 2**40}], "request 1: output_length: 1099511627776"),
        (SETUP, [{**ROWS[0], "model": "x"}], "request 1: model: 'x' is not in models:"),
        (SETUP, [*ROWS, ROWS[0]], "request 41: timestamp: 0 is before the request above"),
        (SETUP, [], "the trace is empty"),
        (SETUP, "none.jsonl", r"none\.jsonl"),
    ],
)
def test_mistakes_are_named(setup: dict[str, Any], trace: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        simulate(setup, trace)
    assert isinstance(caught.value, TraceError) == (trace is not None)


def test_without_polars_there_is_csv(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    results.write(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"{name}.csv" for name in TABLES} <= names
    assert not [name for name in names if name.endswith(".parquet")]
    with pytest.raises(ConfigError, match=r"pip install 'prism-sim\[frames\]'"):
        tables.frame("models", results._run)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ((), "pandas and pyarrow: are not installed; run pip install 'prism-sim[pandas]'"),
        (("pandas",), "pyarrow: is not installed; run pip install 'prism-sim[pandas]'"),
    ],
)
def test_without_pandas_the_error_says_what_to_install(
    results: Results, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], says: str
) -> None:
    """Checks a line that polars does not print: its own is `No module named 'pyarrow'`."""
    models = results.models
    monkeypatch.setattr(tables, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        to_pandas(models)


def test_frames_become_those_of_pandas(results: Results) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    found = to_pandas(results.requests)
    assert list(found.columns) == results.requests.columns
    assert found["met_ttft"].mean() == results.requests["met_ttft"].mean()


def test_the_notebook_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "notebook.py")],
        cwd=ROOT,
        env={**os.environ, "POLARS_FMT_MAX_COLS": "20"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for shown in ("first-fit", "within_slo", "activations", "ttft_p99_s"):
        assert shown in done.stdout
