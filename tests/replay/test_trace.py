"""The trace format: round trips, and errors that name file, line and key."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from prism.errors import TraceError
from prism_replay.trace import models_of, read_trace, write_trace
from tests.replay.records import a_request

GOOD: dict[str, Any] = {"timestamp": 0, "model": "a", "input_length": 3, "output_length": 2}


def lines(path: Path, *values: object) -> Path:
    texts = (v if isinstance(v, str) else json.dumps(v) for v in values)
    path.write_text("\n".join(texts) + "\n")
    return path


def error(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    return str(caught.value)


def test_written_traces_read_back_equal(tmp_path: Path) -> None:
    trace = [
        a_request(0.0, slo_ttft_ms=100.0, slo_tpot_ms=5.5, slo_e2e_ms=200.0, hash_ids=(1, 2)),
        a_request(1.25, "other", prompt="Grüße"),
    ]
    write_trace(tmp_path / "t.jsonl", trace)
    assert read_trace(tmp_path / "t.jsonl") == trace


def test_gzip_and_blank_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" + json.dumps(GOOD).encode() + b"\n\n"))
    assert [request.input_length for request in read_trace(path)] == [3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": -1}, "timestamp: Expected `float` >= 0"),
        ({"input_length": 0}, "input_length: Expected `int` >= 1"),
        ({"output_length": 0}, "output_length: Expected `int` >= 1"),
        ({"output_length": 2.5}, "output_length: Expected `int`"),
        ({"model": ""}, "model: Expected `str` of length >= 1"),
        ({"slo_ttft_ms": 0}, "slo_ttft_ms: Expected `float` > 0"),
        ({"slo_tfft_ms": 5}, "unknown field `slo_tfft_ms`"),
        ({"hash_ids": ["x"]}, "hash_ids[0]: Expected `int`"),
    ],
)
def test_a_bad_value_names_line_and_key(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = lines(tmp_path / "t.jsonl", GOOD, GOOD | {"timestamp": 1} | change)
    message = error(path)
    assert message.startswith(f"{path}:2: ")
    assert says in message


def test_a_missing_model_says_how_to_give_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {k: v for k, v in GOOD.items() if k != "model"})
    message = error(path)
    assert message.startswith(f"{path}:1: ")
    assert "`model`" in message
    assert "prism-replay convert" in message


@pytest.mark.parametrize("text", ['{"timestamp": 1', "[1]", "hello", '{"model": "\udcff"}'])
def test_malformed_json_names_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + text.encode(errors="surrogateescape"))
    assert error(path).startswith(f"{path}:2: ")


def test_unsorted_times_name_the_later_line(tmp_path: Path) -> None:
    rows = [GOOD | {"timestamp": t} for t in (5, 9, 7, 9, 7)]
    message = error(lines(tmp_path / "t.jsonl", *rows))
    assert ":3: timestamp: 7 is before the line above (9)" in message


@pytest.mark.parametrize("times", [(1.76e12, 1.76e12 + 5), (0, 1e15)])
def test_times_since_1970_or_in_another_unit_are_found(
    tmp_path: Path, times: tuple[float, float]
) -> None:
    rows = [GOOD | {"timestamp": t} for t in times]
    message = error(lines(tmp_path / "t.jsonl", *rows))
    assert "days without a request" in message
    assert "subtract the first one" in message


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_trace_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    assert "the trace is empty" in error(tmp_path / "t.jsonl")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.jsonl") in error(tmp_path / "none.jsonl")
    assert "cannot be read" in error(tmp_path)
    (tmp_path / "t.jsonl.gz").write_bytes(b"no gzip")
    assert "cannot be read" in error(tmp_path / "t.jsonl.gz")


def test_models_are_ordered_by_requests_then_name() -> None:
    trace = [a_request(model=name) for name in ("c", "b", "a", "b")]
    assert models_of(trace) == ["b", "a", "c"]


def test_the_demo_trace_is_what_its_readme_says() -> None:
    folder = Path(__file__).parents[2] / "traces"
    trace = read_trace(folder / "demo.jsonl")
    said = f"{len(trace)} requests in {trace[-1].arrival_s:.0f} s to the four demo models"
    assert said in (folder / "README.md").read_text()
    assert len(models_of(trace)) == 4


def test_a_file_that_cannot_be_written_is_a_named_error() -> None:
    with pytest.raises(TraceError, match="/proc/x: cannot be written"):
        write_trace(Path("/proc/x"), [a_request(0.0)])
