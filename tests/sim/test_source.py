"""The `trace:` of a YAML in every format that there is a reader for, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_replay.formats.reader import FORMATS
from prism_replay.outcomes import PointOutcome
from prism_sim.cli.sim import main
from prism_sim.scenario.scenario import Scenario, load
from prism_sim.sweeps import points
from prism_sim.sweeps.points import Point

BASE = """
models:
  - {name: a, shape: Llama-3.2-1B}
  - {name: b, shape: Llama-3.2-1B}
"""
MINUTES = ",".join(["3", *["0"] * 1439])
FILES = {
    "prism": '{"timestamp": 0, "model": "x", "input_length": 5, "output_length": 6}\n',
    "arena": "id,timestamp_s,model_id,input_tokens,output_tokens\n1,0.0,3,5,6\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,5,6\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,5,6,11,Conversation log\n",
    "csv": "timestamp_s,model,input_tokens,output_tokens\n0,x,5,6\n",
    "maf": f"HashOwner,HashApp,HashFunction,Trigger,{','.join(str(m) for m in range(1, 1441))}\n"
    f"o,a,{'f' * 64},http,{MINUTES}\n",
    "mooncake": '{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [1]}\n',
    "servegen": "model,client,t_s,rate_rps,iat_cv,dist,p1,p2\nm,7,0,2.0,1.0,G,1.0,0.5\n",
    "sharegpt": json.dumps(
        [
            {
                "conversations": [
                    {"from": "human", "value": "x" * 20},
                    {"from": "gpt", "value": "y" * 24},
                ]
            }
        ]
    ),
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,5,6\n",
}


def scenario(folder: Path, name: str, source: str) -> Scenario:
    (folder / "source.data").write_text(FILES[name])
    path = folder / "cluster.yaml"
    path.write_text(f"{BASE}trace: source.data\nsource: {{format: {name}, {source}}}\n")
    return load(path)


def test_every_reader_is_covered() -> None:
    assert set(FILES) == set(FORMATS)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_gives_requests_of_the_models(tmp_path: Path, name: str) -> None:
    found = scenario(tmp_path, name, "map: popularity, window: 2m, limit: 3")
    assert 1 <= len(found.work) <= 3
    assert set(found.work.model) == {0}
    assert min(found.work.prompt_tokens) >= 1
    if name not in ("maf", "servegen"):
        assert (found.work.prompt_tokens[0], found.work.output_tokens[0]) == (5, 6)
    assert found.work.slo_ttft_s[0] == found.setup.models[0].slo_ttft_s


def test_a_folder_holds_a_file_per_model(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, at in (("a", "1"), ("b", "0")):
        text = f"timestamp_s,input_tokens,output_tokens\n{at},5,6\n"
        (folder / f"{name}.csv").write_text(text)
    path = tmp_path / "cluster.yaml"
    path.write_text(BASE + "trace: models\nsource: {format: csv}\n")
    assert list(load(path).work.model) == [1, 0]


READ = (
    ("maf", "lengths: csv=drawn.csv", "drawn.csv", FILES["csv"]),
    ("servegen", "rate: 1", "client_lengths.csv", "model,client,t_s,field,mean,q (0.5)\n"),
)


@pytest.mark.parametrize(("name", "source", "file", "text"), READ)
def test_a_point_is_simulated_again_when_lengths_change(
    tmp_path: Path, *, name: str, source: str, file: str, text: str
) -> None:
    (tmp_path / file).write_text(text)
    scenario(tmp_path, name, f"map: popularity, window: 2m, {source}")
    point = Point(str(tmp_path / "cluster.yaml"), {})
    before = points._key(point, PointOutcome)
    assert points._key(point, PointOutcome) == before
    (tmp_path / file).write_text(text + "\n")
    assert points._key(point, PointOutcome) != before


def test_a_point_is_simulated_again_when_a_models_file_is_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.csv").write_text("timestamp_s,input_tokens,output_tokens\n0,5,6\n")
    (tmp_path / "cluster.yaml").write_text(f"{BASE}trace: models\nsource: {{format: csv}}\n")
    point = Point(str(tmp_path / "cluster.yaml"), {})
    before = points._key(point, PointOutcome)
    (folder / "a.csv").rename(folder / "b.csv")
    assert points._key(point, PointOutcome) != before


def test_lengths_are_beside_the_yaml_and_not_beside_the_trace(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rates.csv").write_text(FILES["maf"])
    (tmp_path / "lengths.csv").write_text(FILES["csv"].replace("5,6", "70,80"))
    path = tmp_path / "cluster.yaml"
    source = "format: maf, map: popularity, lengths: csv=lengths.csv"
    path.write_text(f"{BASE}trace: traces/rates.csv\nsource: {{{source}}}\n")
    work = load(path).work
    assert {*zip(work.prompt_tokens, work.output_tokens, strict=True)} == {(70, 80)}


MISTAKES = (
    ("format: odd", "source.format: 'odd' is not one of prism"),
    ("format: csv, map: odd", "source.map: 'odd' is not one of popularity"),
    ("format: csv, window: 0s", "source.window: '0s'"),
    ("format: csv, limit: 0", "source.limit: 0 must be >= 1"),
    ("format: maf, rate: 0", "rate and seconds: must be > 0"),
    ("format: csv, lengths: odd", "source.lengths: 'odd': write FORMAT=FILE"),
    ("format: csv, lengths: odd=x", "source.lengths: 'odd=x': format 'odd' is not one of"),
    ("format: csv, lengths: csv=x", "x: cannot be read: No such file or directory"),
    ("format: csv", "request 1: model: 'x' is not in models:"),
    ("format: burstgpt", "source.data:2"),
)


@pytest.mark.parametrize(("source", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    source: str,
    message: str,
) -> None:
    (tmp_path / "source.data").write_text(FILES["csv"])
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{BASE}trace: source.data\nsource: {{{source}}}\n")
    monkeypatch.setattr("sys.argv", ["prism-sim", "run", str(path)])
    with pytest.raises(SystemExit) as exit_:
        main()
    said = capsys.readouterr().err
    assert (exit_.value.code, said.count("\n")) == (2, 1)
    assert message in said
