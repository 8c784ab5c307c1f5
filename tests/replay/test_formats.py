"""Readers of public traces, on small files and on the originals where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.errors import TraceError
from prism_replay.formats.reader import read_format
from prism_replay.trace import models_of

ARENA = "id,timestamp_s,model_id,input_tokens,output_tokens\n"
AZURE, AT = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:0"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE = '{"timestamp": %d, "input_length": 6, "output_length": 5}'


def test_arena_rows_become_requests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "arena.csv"
    path.write_text(ARENA + "1,3.0,0,1,4\n0,3.5,2,7,9\n")
    first, second = read_format(path, "arena")
    assert (first.timestamp, first.model, first.output_length) == (0.0, "model-0", 4)
    assert (second.timestamp, second.model, second.input_length) == (500.0, "model-2", 7)


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000000,10,20\n2023-11-17 00:00:00.7500000,11,21\n"
    )
    assert [(r.timestamp, r.model) for r in read_format(path, "azure")] == [
        (0.0, "code"),
        (1250.0, "code"),
    ]


def test_mooncake_keeps_hash_ids_and_ignores_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"timestamp": 27, "input_length": 6, "output_length": 5, "hash_ids": [4], "turn": 1}\n'
    )
    (request,) = read_format(path, "mooncake")
    assert (request.timestamp, request.model, request.hash_ids) == (0.0, "m", (4,))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("arena", ARENA + "0,1.0,2,seven,9\n", ":2: "),
        ("arena", "id,timestamp_s\n0,1.0\n", "column 'model_id' is missing"),
        ("arena", ARENA, "empty"),
        ("arena", ARENA + "0,nan,2,7,9\n", ":2: the time is nan"),
        ("arena", ARENA + '"0\n1",1.0,2,7,9\n', "a quoted value spans lines"),
        ("arena", ARENA + "0,1.0,2,7,\udcff\n", "is not valid CSV in UTF-8"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", ":2: "),
        ("arena", ARENA + "0,1.0,2,-7,9\n", ":2: -7 input tokens"),
        ("arena", ARENA + "0,1.0,2,7,0\n", ":2: 0 output tokens"),
        ("arena", ARENA + "0,3.5,2,7,9\n1,3.0,0,1,1\n", ":3: the time 3 s is before"),
        ("azure", AZURE + f"{AT}0.5,0,1\n", ":2: 0 input tokens"),
        ("azure", AZURE + f"{AT}0.5,1,-1\n", ":2: -1 output tokens"),
        ("azure", AZURE + f"{AT}1.5,1,1\n{AT}0.5,1,1\n", ":3: the time "),
        ("burstgpt", BURST + "5,GPT-4,9,-1,8,API log\n", ":2: -1 output tokens"),
        ("burstgpt", BURST + "5,GPT-4,0,1,1,API log\n", ":2: 0 input tokens"),
        ("burstgpt", BURST + "5,GPT-4,9,1,8,x\n4,GPT-4,9,1,8,x\n", ":3: the time 4 s is before"),
        ("burstgpt", BURST + "-5,GPT-4,9,1,8,x\n", ":2: the time -5 s is below 0"),
        ("mooncake", '{"timestamp": 1}\n', "input_length"),
        ("mooncake", f"{MOONCAKE % 9}\n{MOONCAKE % 8}\n", ":2: the time 0.008 s is before"),
        ("mooncake", f"{MOONCAKE % -1}\n", ":1: timestamp"),
        ("mooncake", "{\n", ":1: not a JSON object"),
        ("parquet", "x", "format 'parquet' is not one of prism"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(TraceError) as caught:
        read_format(path, name)
    assert says in str(caught.value)


def test_the_originals_are_read(public_traces: Path) -> None:
    arena = read_format(public_traces / "arena_chat27_vtc.csv", "arena")
    assert (len(arena), arena[-1].timestamp) == (1500, 600_000.0)
    assert models_of(arena)[:3] == ["model-2", "model-10", "model-0"]
    mooncake = read_format(public_traces / "mooncake_synthetic_trace.jsonl.gz", "mooncake")
    assert all(request.hash_ids for request in mooncake)
    azure = read_format(public_traces / "AzureLLMInferenceTrace_code.csv", "azure")
    assert models_of(azure) == ["AzureLLMInferenceTrace_code"]
