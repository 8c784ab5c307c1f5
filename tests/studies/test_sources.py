"""Where the studies' traces come from: the user's files, else generators like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.replay.trace import models_of
from prism.studies.sources import STYLES, Sources

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
