"""Figures of scripts/gpu-check and their expectations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.gpu_check import figures, plan
from lab.gpu_check.expected import BY_NAME, EXPECTED, MET, MISSED, NOT_JUDGED, Expected
from lab.gpu_check.report import DOUBLES_VARIABLE
from tests.gpu_check.steps import report_in
from tests.kvcached.compiling import ROOT

RATIO = Expected("probe", "x", "", "us", "that", at_most=3, of_ratio=True)
VALUE = Expected("probe", "y", "", "GB/s", at_least=2)


@pytest.mark.parametrize(
    ("expected", "value", "reference", "verdict"),
    [
        (RATIO, 9.0, 3.0, MET),
        (RATIO, 9.1, 3.0, MISSED),
        (RATIO, 9.0, None, NOT_JUDGED),
        (RATIO, 9.0, 0.0, NOT_JUDGED),
        (VALUE, 2.0, 100.0, MET),
        (VALUE, 1.9, None, MISSED),
        (replace(VALUE, at_least=None), 1.9, None, NOT_JUDGED),
    ],
)
def test_a_figure_is_judged_by_its_expectation(
    expected: Expected,
    value: float,
    reference: float | None,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BY_NAME, ("probe", expected.name), expected)
    found = figures.figure("probe", expected.name, value, reference, judged=True)
    assert found["verdict"] == verdict
    assert figures.figure("probe", expected.name, value, reference, judged=False)["verdict"] == (
        NOT_JUDGED
    )


def test_a_line_has_value_ratio_and_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_NAME, ("probe", "x"), RATIO)
    line = figures.line("x", figures.figure("probe", "x", 9.0, 2.0, judged=True))
    assert line == "x: 9 us, 4.5 of the reference (expected at most 3 ratio: missed)"


def test_times_on_doubles_are_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = report_in(tmp_path, "probe")
    monkeypatch.setenv(DOUBLES_VARIABLE, "1")
    report.figure("page_create", 1e9)
    assert report.facts["figures"]["page_create"]["verdict"] == NOT_JUDGED
    monkeypatch.delenv(DOUBLES_VARIABLE)
    report.figure("page_create", 1e9)
    assert report.facts["figures"]["page_create"]["verdict"] == MISSED


def test_a_figure_without_a_stated_expectation_is_refused(tmp_path: Path) -> None:
    report = report_in(tmp_path, "probe")
    with pytest.raises(KeyError):
        report.figure("made_up", 1.0)


def test_every_expectation_is_of_a_step_and_says_where_it_comes_from() -> None:
    steps = {step.name for step in plan.steps(carried=False, quick=False)}
    assert {expected.step for expected in EXPECTED} <= steps
    assert len(BY_NAME) == len(EXPECTED)
    for expected in EXPECTED:
        has_bound = expected.at_most is not None or expected.at_least is not None
        assert not has_bound or expected.source, expected.name
        assert not expected.of_ratio or expected.reference, expected.name


def test_every_expectation_is_of_a_figure_that_a_step_records() -> None:
    paths = (ROOT / "lab/gpu_check").rglob("*.py")
    sources = "".join(path.read_text() for path in paths if path.name != "expected.py")
    for expected in EXPECTED:
        assert f'"{expected.name}"' in sources, f"no step records {expected.name}"


def test_the_documents_table_is_made_of_them() -> None:
    text = Path(ROOT / "docs/gpu-results.md").read_text()
    command = "<!-- python -m lab.gpu_check.figures -->\n"
    written = text.partition(command)[2].partition("\n<!-- end -->")[0]
    assert written == figures.table(), "run the command and put its table into the document"
