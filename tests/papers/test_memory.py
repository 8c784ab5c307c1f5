"""Points of studies that once found the simulator wrong."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from lab.papers.prism.prism_setup import E2E_MODELS, model_names, prepared
from lab.papers.study.lab import Lab
from lab.papers.study.trial import Trial


def test_a_run_and_those_who_come_back_do_not_take_the_same_pages(tmp_path: Path) -> None:
    """Resumes two retracted requests in a row during a run of decode steps. The first one took
    memory that the run had claimed within its last quantum; then the second one checked for
    memory."""
    lab = Lab(tmp_path, lambda what: nullcontext(lambda done, total: None))
    trace = lab.sources.styled("hyperbolic", model_names(len(E2E_MODELS)), 120.0, 0)
    cluster = prepared(lab, "eight", [(name, 1) for name in E2E_MODELS], trace)
    changes = {"policy": "prism", "rate_scale": 8.0, "slo_scale": 10.0, "gpus.count": 2}
    found = lab.run([Trial(cluster.config, {**changes, "gpus.memory": "40GiB"})])[0]
    assert found.summary is not None
    assert found.counts["retractions"] > 0
    assert found.lost == 0
