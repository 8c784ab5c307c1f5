"""The command: names, files, its errors, and that it resumes where it stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.papers import catalog
from lab.papers.__main__ import main
from lab.papers.study import lab as laboratory
from lab.papers.study import trial

pytestmark = pytest.mark.slow

NAME = "prism-fig7-gpus"
OTHER = "prism-table1"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["papers", *arguments])
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def test_names_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(catalog.STUDIES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prism-fig99", "--out", "x"), "study 'prism-fig99' is not one of all, prism-dedicated"),
        ((), "study: NAME is missing; give one of all"),
        ((OTHER,), "study: --out is missing; give a folder"),
        ((OTHER, "--out", "x", "--traces", "nowhere"), "--traces nowhere: is not a folder"),
    ],
)
def test_what_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"papers: {said}")
    assert shown.count("\n") == 1


def test_the_same_bytes_on_any_number_of_cores_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two = ("--quick", "--seeds", "2")
    for jobs in ("1", "2"):
        out = str(tmp_path / jobs)
        assert call(monkeypatch, OTHER, *two, "--out", out, "--jobs", jobs) == 0
    files = sorted(p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*.*"))
    assert len(files) > 5
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes(), file

    def never(point: trial.Trial) -> trial.TrialOutcome:
        raise AssertionError(f"{point} is simulated again")

    monkeypatch.setattr(laboratory, "simulate", never)
    assert call(monkeypatch, OTHER, *two, "--out", str(tmp_path / "1"), "--jobs", "1") == 0
    table = (tmp_path / "1" / OTHER / "points.csv").read_text()
    assert "requests_ci95" in table
    assert "seeds 0, 10" in (tmp_path / "1" / OTHER / "report.html").read_text()


def test_all_makes_one_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two = {name: catalog.STUDIES[name] for name in (OTHER, NAME)}
    monkeypatch.setattr(catalog, "STUDIES", two)
    assert call(monkeypatch, "all", "--quick", "--out", str(tmp_path), "--jobs", "1") == 0
    page = (tmp_path / "studies.md").read_text()
    assert all(f"## {name}\n" in page for name in two)
    assert "quick: meaningless figures" in " ".join(capsys.readouterr().out.split())
