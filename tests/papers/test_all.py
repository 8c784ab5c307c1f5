"""Every study runs from an empty folder at the size for tests and writes its report."""

from __future__ import annotations

import csv
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from lab.papers import catalog, study_report
from lab.papers.study.lab import Lab, Progress
from lab.papers.study.sources import Sources

pytestmark = pytest.mark.slow


def silent(what: str) -> AbstractContextManager[Progress]:
    return nullcontext(lambda done, total: None)


@pytest.mark.parametrize("name", catalog.STUDIES)
def test_runs_and_reports(name: str, tmp_path: Path) -> None:
    study = catalog.get(name)
    findings = study.run(Lab(tmp_path, silent, quick=True))
    assert findings.comparisons
    assert findings.rows
    assert findings.plots
    assert findings.budget
    assert all(c.what and c.source and c.verdict for c in findings.comparisons)
    assert any(c.ours != "-" for c in findings.comparisons)
    found = study_report.result(study, {0: findings}, quick=True, sources=Sources())
    study_report.write(tmp_path, found)
    assert json.loads((tmp_path / "study.json").read_text())["name"] == name
    with (tmp_path / "points.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(findings.rows)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == len(findings.plots)
    assert "http" not in page
    assert study.title in study_report.markdown([found])


def test_every_name_says_its_paper() -> None:
    for name, study in catalog.STUDIES.items():
        assert name == study.name
        assert name.split("-")[0] == study.source.split(",")[0].lower()
        assert study.setup
        assert study.shortened
        assert study.differs
