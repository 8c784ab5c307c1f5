"""The validation on rows whose truth is known, and on the published ones where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.calibration import measured
from lab.calibration.closed_loop import run_closed_loop
from lab.calibration.measured import ServingRow, traces_folder
from lab.calibration.validate import app as validation
from lab.calibration.validate import (
    closed_loop_of,
    dedicated_section,
    grid_cost,
    serving_errors,
    serving_section,
    step_section,
)
from prism.errors import ConfigError
from prism_sim.cli.costs import app

ROW = ServingRow("h100", "sglang", "Qwen/Qwen3-32B", 2, 1024, 128, 16, 1.0, 1.0)


@pytest.fixture
def published() -> Path:
    folder = traces_folder()
    if not (folder / measured.SILICON).exists():
        pytest.skip(f"no measurements in {folder}; set PRISM_TRACES")
    return folder


def test_a_row_that_is_as_predicted_has_no_error() -> None:
    latency = run_closed_loop(grid_cost(ROW.gpu, ROW.model, ROW.tp), closed_loop_of(ROW))
    exact = ServingRow(**(vars(ROW) | {"ttft_s": latency.ttft_s, "tpot_s": latency.tpot_s}))
    errors = serving_errors(exact)
    assert (errors.tpot, errors.ttft_together) == (0.0, 0.0)
    assert errors.within
    assert errors.ttft_spread < 0
    slower = ServingRow(**(vars(exact) | {"tpot_s": 2 * latency.tpot_s}))
    assert serving_errors(slower).tpot == pytest.approx(-0.5)


def test_memory_bounds_the_modelled_batch() -> None:
    small = ServingRow(**(vars(ROW) | {"tp": 1, "concurrency": 512}))
    # 88 % of 80 GiB less 65.5 GB of weights at 256 KiB a token
    assert closed_loop_of(small).batch_max == int((0.88 * 80 * 2**30 - 65.5e9) / 2**18 / 1152)


def test_the_published_rows_are_read_and_most_tpots_are_near(published: Path) -> None:
    rows = measured.silicon_rows(published)
    assert len(rows) == 778
    assert {row.model for row in rows} >= {"Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"}
    section = serving_section([row for row in rows if row.engine == "trtllm"][::20])
    assert "| **all** | 22 |" in section
    steps = measured.splitwise_rows(published)
    assert {(row.gpu, row.tp) for row in steps} == {
        (gpu, tp) for gpu in ("a100-80", "h100") for tp in (2, 4, 8)
    }
    assert step_section(steps).count("\n| a100-80 |") == 6
    assert len(measured.dedicated_rows(published)) == 8


def test_the_page_in_the_docs_is_what_the_command_writes(published: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost-validation.md").read_text().splitlines()
    rows = [row for row in measured.silicon_rows(published) if row.engine == "sglang"]
    sections = (
        serving_section(rows),
        step_section(measured.splitwise_rows(published)),
        dedicated_section(measured.dedicated_rows(published)),
    )
    written = [line for section in sections for line in section.splitlines()]
    assert len(written) > 40
    assert not [line for line in written if line not in page and "**all**" not in line]


def test_the_command_writes_a_page(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.calibration.validate.ROUNDS", 1)
    out = tmp_path / "page.md"
    result = CliRunner().invoke(validation, ["--out", str(out), "--traces", str(published)])
    assert result.exit_code == 0
    assert "| **all** | 778 |" in out.read_text()


def test_missing_and_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=measured.SILICON):
        measured.silicon_rows(tmp_path)
    (tmp_path / measured.SILICON).write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="does not have column 'silicon_tpot_ms'"):
        measured.silicon_rows(tmp_path)


def test_show_says_where_costs_are_from() -> None:
    result = CliRunner().invoke(app, ["show", "--gpu", "h100", "--model", "Llama-3.1-8B"])
    assert result.exit_code == 0
    assert "aiconfigurator-core" in result.output
    assert "128KiB" in result.output
    roofline = CliRunner().invoke(app, ["show", "--gpu", "a100-40", "--model", "Llama-3.1-8B"])
    assert "roofline" in roofline.output
