"""Readers of public sources beyond plain traces, on small files and the originals."""

from __future__ import annotations

import gzip
import json
import lzma
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.errors import TraceError
from prism_replay.formats.reader import FORMATS, read_format
from prism_replay.formats.rows import ReadOptions
from prism_replay.formats.sampled import tokens_of
from prism_replay.formats.servegen import ClientWindow
from prism_replay.formats.writers import write_mooncake
from prism_replay.lengths import EmpiricalLengths, lengths_of
from prism_replay.report.stats import by_model
from prism_replay.trace import TraceRequest, models_of, read_trace, write_trace
from tests.replay.records import a_request

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
CSV = "timestamp_s,model,input_tokens,output_tokens\n"
RATES = "model,client,t_s,rate_rps,iat_cv,dist,p1,p2\n"
LENGTHS = "model,client,t_s,field,mean,quantiles(0 0.5 1)\n"
MAF = "HashOwner,HashApp,HashFunction,Trigger," + ",".join(str(m) for m in range(1, 1441)) + "\n"
MAF21 = "app,func,end_timestamp,duration\n"


def file(folder: Path, text: str, name: str = "source.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_burstgpt_leaves_failed_requests_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,9,0,9,API log\n7,GPT-4,1087,230,1317,A\n"
    path = file(tmp_path, BURST + rows)
    found = read_format(path, "burstgpt")
    assert read_format(path, "burstgpt") == found
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{path}: left out 1 failed requests (without response tokens)"]
    assert [(r.timestamp, r.model, r.input_length, r.output_length) for r in found] == [
        (0.0, "ChatGPT", 472, 18),
        (2000.0, "GPT-4", 1087, 230),
    ]


def test_azure_of_2024_has_a_time_zone(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    path = file(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert [r.timestamp for r in read_format(path, "azure")] == [0.0, 990.07]


def test_vidur_with_and_without_arrivals(tmp_path: Path) -> None:
    timed = read_format(file(tmp_path, VIDUR + "0.5,10,20\n1.5,11,21\n", "a.csv"), "vidur")
    assert [(r.timestamp, r.model, r.input_length) for r in timed] == [
        (500.0, "a", 10),
        (1500.0, "a", 11),
    ]
    lengths = "num_prefill_tokens,num_decode_tokens\n" + "7,8\n" * 2000
    path = file(tmp_path, lengths)
    drawn = read_format(path, "vidur", ReadOptions(rate_rps=4.0))
    assert drawn[-1].arrival_s == pytest.approx(2000 / 4, rel=0.1)
    assert drawn == read_format(path, "vidur", ReadOptions(rate_rps=4.0))
    assert drawn != read_format(path, "vidur", ReadOptions(rate_rps=4.0, seed=1))


def test_csv_with_models_and_a_folder_of_one_model_each(tmp_path: Path) -> None:
    both = read_format(file(tmp_path, CSV + "0,x,1,2\n1,y,3,4\n"), "csv")
    assert [(r.model, r.output_length) for r in both] == [("x", 2), ("y", 4)]
    folder = tmp_path / "models"
    folder.mkdir()
    for name, start in (("a", 0.5), ("b", 0.0)):
        file(folder, f"timestamp_s,input_tokens,output_tokens\n{start},1,2\n2,1,2\n", f"{name}.csv")
    found = read_format(folder, "csv")
    assert [(r.model, r.arrival_s) for r in found] == [("b", 0), ("a", 0.5), ("a", 2), ("b", 2)]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_files_are_read(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"source.csv{suffix}"
    path.write_bytes(pack((CSV + "0,x,1,2\n").encode()))  # type: ignore[operator]
    assert len(read_format(path, "csv")) == 1


def test_servegen_clients_become_models_with_their_lengths(tmp_path: Path) -> None:
    rows = "".join(f"m,7,{t},2.0,1.0,G,1.0,0.5\n" for t in (1200, 1800))
    rows += "m,8,1200,0.5,2.0,W,0.6,1.33\nm,9,86400,9.0,1.0,G,1.0,0.1\n"
    path = file(tmp_path, RATES + rows, "rates.csv")
    lengths = 'm,7,0,input,2,"1 2 3"\nm,7,0,output,5,"5 5 5"\n'
    file(tmp_path, LENGTHS + lengths, "client_lengths.csv")
    options = ReadOptions(seconds=1200, lengths=EmpiricalLengths(((70, 80),)))
    groups = by_model(read_format(path, "servegen", options))
    assert set(groups) == {"m-7", "m-8"}
    assert len(groups["m-7"]) == pytest.approx(2400, rel=0.1)
    assert len(groups["m-8"]) == pytest.approx(0.5 * 600, rel=0.35)
    assert max(r.arrival_s for r in groups["m-8"]) < 600
    assert {r.input_length for r in groups["m-7"]} == {1, 2, 3}
    assert {r.output_length for r in groups["m-7"]} == {5}
    assert {r.input_length for r in groups["m-8"]} == {70}
    thin = read_format(path, "servegen", ReadOptions(seconds=1200, thin=0.1))
    assert len(thin) == pytest.approx(270, rel=0.3)


@pytest.mark.parametrize("weibull", [False, True])
def test_a_clients_gaps_follow_its_window(weibull: bool) -> None:
    window = ClientWindow("c", 0.0, 5.0, weibull, 0.7, 0.2)
    times_s = window.arrivals_s(np.random.default_rng(1))
    gaps_s = np.diff(times_s)
    drawn = 0.2 * np.random.default_rng(2).weibull(0.7, 99_999)
    expected_s = float(drawn.mean()) if weibull else 0.7 * 0.2
    assert float(gaps_s.mean()) == pytest.approx(expected_s, rel=0.1)
    assert 0 <= times_s[0] <= times_s[-1] < 600


def test_azure_functions_of_2019_are_drawn_within_their_minutes(tmp_path: Path) -> None:
    counts = ["0"] * 1440
    counts[61], counts[62], counts[200] = "3", "2", "9"
    path = file(tmp_path, MAF + f"o,a,{'f' * 64},http,{','.join(counts)}\n")
    found = read_format(path, "maf", ReadOptions(start_s=3600, seconds=600))
    assert (len(found), models_of(found)) == (5, ["f" * 12])
    assert sum(request.arrival_s < 60 for request in found) >= 3
    assert read_format(path, "maf", ReadOptions(start_s=3600, seconds=600)) == found


def test_azure_functions_of_2021_start_when_they_started(tmp_path: Path) -> None:
    path = file(tmp_path, MAF21 + "a,f,10.5,0.5\na,g,4000,1\na,g,12,1\n")
    found = read_format(path, "maf")
    assert [(r.model, r.arrival_s) for r in found] == [("f", 0.0), ("g", 1.0)]


def test_sharegpt_gives_first_questions_and_answers(tmp_path: Path) -> None:
    said = [("system", "s"), ("human", "x" * 41), ("gpt", "y" * 400), ("human", "z")]
    conversations = [
        {"id": "1", "conversations": [{"from": who, "value": text} for who, text in said]},
        {"id": "2", "conversations": [{"from": "human", "value": "only asked"}]},
        {"id": "3", "conversations": []},
    ]
    found = read_format(file(tmp_path, json.dumps(conversations, indent=1), "sg.json"), "sharegpt")
    assert [(r.model, r.input_length, r.output_length, r.prompt) for r in found] == [
        ("sg", 11, 100, "x" * 41)
    ]
    assert tokens_of("") == 1
    assert lengths_of(found).pairs == ((11, 100),)


def test_mooncake_is_written_per_model_and_read_back(tmp_path: Path) -> None:
    trace = [
        a_request(0.0, "a", input_length=1025, hash_ids=(4, 9)),
        a_request(0.5, "b/c", input_length=1025),
    ]
    with pytest.raises(TraceError, match=r"put \{model\} into"):
        write_mooncake(tmp_path / "m.jsonl", trace)
    paths = write_mooncake(tmp_path / "{model}.jsonl.gz", trace)
    assert [path.name for path in paths] == ["a.jsonl.gz", "b-c.jsonl.gz"]
    (first,), (second,) = (read_format(path, "mooncake") for path in paths)
    assert first.hash_ids == (4, 9)
    assert second.hash_ids == (10, 11, 12)
    assert (second.input_length, second.output_length) == (1025, 5)


def test_our_own_format_can_be_packed(tmp_path: Path) -> None:
    trace = [a_request(0.0), a_request(1.0)]
    write_trace(tmp_path / "t.jsonl.gz", trace)
    assert read_trace(tmp_path / "t.jsonl.gz") == trace
    assert read_format(tmp_path / "t.jsonl.gz", "prism") == trace


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("burstgpt", BURST + "-5,GPT-4,9,9,18,x\n", ":2: the time -5 s is below 0"),
        ("burstgpt", BURST + "5,GPT-4,0,9,9,x\n", ":2: 0 input tokens"),
        ("burstgpt", BURST + "5,,1,9,9,x\n", ":2: the model does not have a name"),
        ("burstgpt", BURST + "5,GPT-4,9,0,9,x\n", "empty"),
        ("vidur", VIDUR + "2,1,1\n1,1,1\n", ":3: the time 1 s is before the row above (2 s)"),
        ("vidur", VIDUR + "2,1,0\n", ":2: 0 output tokens"),
        ("vidur", VIDUR, "empty"),
        ("csv", CSV + "0,x,1,2\n-1,x,1,2\n", ":3: the time -1 s is below 0"),
        ("csv", CSV + "0,x,1\n", ":2: "),
        ("servegen", RATES, "empty"),
        ("servegen", RATES + "m,7,0,2.0,1.0,X,1,1\n", ":2: dist: 'X'"),
        ("servegen", RATES + "m,7,0,2.0,1.0,G,0,1\n", ":2: p1: 0"),
        ("servegen", RATES + "m,7,0,-2.0,1.0,G,1,1\n", ":2: rate_rps"),
        ("servegen", RATES + "m,7,0,99999.0,1.0,G,1,1\n", "20,000,000"),
        ("maf", MAF21 + "a,f,-5,1\n", "empty"),
        ("maf", MAF21 + "a,f,nan,1\n", ":2: the time is nan"),
        ("maf", MAF + "o,a,f,http," + ",".join(["-1"] * 1440) + "\n", ":2: minute 1: -1"),
        ("maf", MAF + "o,a,f,http,1\n", ":2: "),
        ("sharegpt", "{}", "a list of conversations"),
        (
            "sharegpt",
            '[{"conversations": [{"from": "human"}]}]',
            "conversation 1: a message does not have",
        ),
        ("sharegpt", "[]", "empty"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_format(file(tmp_path, text), name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"does not have a \.csv file"):
        read_format(tmp_path, "csv")


@pytest.mark.parametrize(
    "options", [{"rate_rps": 0.0}, {"seconds": -1.0}, {"thin": 1.5}, {"start_s": -1.0}]
)
def test_impossible_options_are_errors(options: dict[str, float]) -> None:
    with pytest.raises(TraceError):
        ReadOptions(**options)  # type: ignore[arg-type]


def test_servegens_original_rates_are_read(public_traces: Path) -> None:
    path = public_traces / "servegen_client_rates.csv.xz"
    found = read_format(path, "servegen", ReadOptions(start_s=172_800, seconds=600, thin=0.002))
    assert 500 < len(found) < 20_000
    assert len(models_of(found)) > 20
    assert found[-1].arrival_s < 600


HEADS = {
    "arena": "id,timestamp_s,model_id,input_tokens,output_tokens\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "burstgpt": BURST,
    "csv": CSV,
    "maf": MAF21,
    "servegen": RATES,
    "vidur": VIDUR,
}
values = st.sampled_from(["0", "1", "-1", "1e999", "nan", "", "x", "2024-01-01", "G", '"', "\x00"])


def attempt(path: Path, name: str) -> tuple[list[TraceRequest], str]:
    try:
        return read_format(path, name), ""
    except TraceError as error:
        return [], str(error)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.lists(st.lists(values, max_size=9), max_size=4),
    tail=st.binary(max_size=20),
)
def test_damaged_files_are_named_and_nothing_else_happens(
    name: str, rows: list[list[str]], tail: bytes
) -> None:
    text = HEADS.get(name, "") + "".join(",".join(row) + "\n" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source.csv"
        path.write_bytes(text.encode() + tail)
        found, complaint = attempt(path, name)
    assert found or str(path) in complaint
    assert all(r.timestamp >= 0 and min(r.input_length, r.output_length) >= 1 for r in found)
