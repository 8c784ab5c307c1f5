"""Setups of a study keep their names for themselves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from lab.papers.prism.prism_pair import phased
from lab.papers.study.lab import Lab
from prism.errors import ConfigError
from prism_replay.lengths import Lengths

LENGTHS = Lengths(input_median=100, input_sigma=0.5, input_max=500, output_median=20)


@pytest.mark.parametrize("other", ["setup", "trace"])
def test_a_setup_is_not_overwritten_by_another(tmp_path: Path, other: str) -> None:
    lab = Lab(tmp_path, lambda what: nullcontext(lambda done, total: None))
    trace = phased(lab, [(20.0, 1.0, 1.0)], [LENGTHS, LENGTHS])
    path = Path(lab.setup("pair", {"a": 1}, trace))
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert lab.setup("pair", {"a": 1}, trace) == str(path)
    # another seed has its own setups
    replace(lab, seed=1).setup("pair", {"a": 2}, trace)
    config, shorter = ({"a": 2}, trace) if other == "setup" else ({"a": 1}, trace[:-1])
    with pytest.raises(ConfigError, match="this study has a different setup of that name"):
        lab.setup("pair", config, shorter)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_a_later_run_writes_its_own(tmp_path: Path) -> None:
    for count in (1, 2):
        lab = Lab(tmp_path, lambda what: nullcontext(lambda done, total: None))
        path = lab.write("pair", {"gpus": {"count": count}})
        assert f"count: {count}" in Path(path).read_text()
