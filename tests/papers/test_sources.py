"""Sources of the studies' traces: the user's files, else generators like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.papers import catalog, study_report
from lab.papers.study.findings import Findings
from lab.papers.study.sources import STYLES, Sources
from prism_replay.generators.bursty import PRESETS
from prism_replay.trace import models_of

ARENA = """id,timestamp_s,model_id,input_tokens,output_tokens
0,0.5,3,11,21
1,1.0,3,12,22
2,2.0,0,13,23
"""


@pytest.mark.parametrize("style", STYLES)
def test_without_files_a_generator_stands_in(style: str) -> None:
    sources = Sources()
    trace = sources.styled(style, ["a", "b", "c"], 120.0, seed=1)
    assert trace == sources.styled(style, ["a", "b", "c"], 120.0, seed=1)
    assert set(models_of(trace)) <= {"a", "b", "c"}
    assert 0 <= trace[0].arrival_s <= trace[-1].arrival_s < 120.0
    assert "generators" in sources.described()


def test_the_arena_sample_is_used_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "arena_chat27.csv").write_text(ARENA)
    sources = Sources(tmp_path)
    trace = sources.styled("arena-chat", ["most", "less"], 2.5, seed=0)
    assert [(r.model, r.output_length) for r in trace] == [("most", 21), ("most", 22), ("less", 23)]
    assert "arena_chat27.csv" in sources.described()


def test_a_shorter_arena_sample_is_taken_whole(tmp_path: Path) -> None:
    rows = [f"{i},{i / 2},{i % 9},{10 + i},20" for i in range(121)]
    (tmp_path / "arena_chat27.csv").write_text(ARENA.splitlines()[0] + "\n" + "\n".join(rows))
    sources = Sources(tmp_path)
    trace = sources.styled("arena-chat", [f"m{i}" for i in range(8)], 900.0, seed=0)
    assert len(trace) > 120 * 8 / 9 - 2
    assert trace[-1].arrival_s <= 60
    (said,) = sources.shortened
    assert said.startswith("arena-chat: the 60 s of its sample instead of 900 s")
    assert said.endswith("instead of 900 s")
    found = study_report.result(
        catalog.get("prism-fig7-rate"),
        {0: Findings([], [], {})},
        quick=False,
        sources=sources,
    )
    assert f"Shortened: 10 minutes of trace, four rates; {said}." in study_report.markdown([found])


def test_beyond_the_arena_sample_its_lengths_come_at_the_generators_rate(tmp_path: Path) -> None:
    (tmp_path / "arena_chat27.csv").write_text(ARENA)
    models = ["most", "less", "least"]
    trace = Sources(tmp_path).styled("arena-chat", models, 1800.0, seed=0)
    assert {r.output_length for r in trace} == {21, 22, 23}
    generated = Sources().styled("arena-chat", models, 1800.0, seed=0)
    assert [r.arrival_s for r in trace] == [r.arrival_s for r in generated]


RATES = "model,client,t_s,rate_rps,iat_cv,dist,p1,p2\n"


def test_servegens_arrivals_come_at_the_generators_rate_with_its_lengths(tmp_path: Path) -> None:
    rows = [
        f"m,{client},{t},{40 / client},1.0,G,1,{client / 40}"
        for client in (1, 2, 4)
        for t in (0, 600)
    ]
    (tmp_path / "servegen_client_rates.csv").write_text(RATES + "\n".join(rows) + "\n")
    sources = Sources(tmp_path)
    trace = sources.styled("hyperbolic", ["a", "b", "c"], 900.0, seed=1)
    assert trace == sources.styled("hyperbolic", ["a", "b", "c"], 900.0, seed=1)
    assert models_of(trace) == ["a", "b", "c"]
    assert trace[-1].arrival_s < 900
    generated = PRESETS["hyperbolic"]
    assert len(trace) == pytest.approx(generated.rate_rps * 3 / 24 * 900, rel=0.3)
    mean = sum(r.output_length for r in trace) / len(trace)
    drawn = Sources().styled("hyperbolic", ["a", "b", "c"], 900.0, seed=1)
    assert mean == pytest.approx(sum(r.output_length for r in drawn) / len(drawn), rel=0.3)


def test_azure_functions_come_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    rows = [f"a,f{i % 3},{i / 2},0.1" for i in range(240)]
    (tmp_path / "maf.csv").write_text("app,func,end_timestamp,duration\n" + "\n".join(rows) + "\n")
    for rate_rps in (0.5, 8.0):
        trace = Sources(tmp_path).functions(["x", "y"], 100.0, rate_rps, seed=3)
        assert trace is not None
        assert len(trace) == pytest.approx(100 * rate_rps, rel=0.3)
        assert {r.model for r in trace} == {"x", "y"}
    assert Sources().functions(["x"], 100.0, 1.0, seed=3) is None
