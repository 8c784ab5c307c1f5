"""The studies' latencies on dedicated GPUs are those that were measured."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from lab.papers.prism.prism_calibration import dedicated
from lab.papers.study.lab import Lab


def test_latencies_and_activations_are_near_the_measured(tmp_path: Path) -> None:
    found = dedicated(Lab(tmp_path, lambda what: nullcontext(lambda done, total: None)))
    assert [c.what for c in found.comparisons if not c.agrees] == []
