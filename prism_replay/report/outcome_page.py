"""Result files of several outcomes: HTML report, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from prism_replay.outcomes import Rows, write_csv
from prism_replay.report.page import environment
from prism_replay.report.page_tables import PageTable, difference_page_tables, outcome_tables
from prism_replay.results import write_json


class Contents(NamedTuple):
    """Contents of the files of one command."""

    name: str
    # For the JSON.
    found: Sequence[msgspec.Struct]
    rows: Rows
    seeds: Rows
    differences: Rows
    # Tables of the page. None: those of `rows`.
    tables: Sequence[PageTable] | None = None


def write_outcomes(
    out: Path, given: Contents, program: str, title: str, plots: Mapping[str, str]
) -> None:
    """Writes NAME.json, NAME.csv, seeds.csv, report.html and, if there are differences,
    differences.csv to `out`.

    Args:
        program: Name of the command, for the page's title.
        plots: Name -> SVG.
    """
    write_json(out / f"{given.name}.json", given.found)
    write_csv(out / f"{given.name}.csv", given.rows)
    write_csv(out / "seeds.csv", given.seeds)
    tables = list(outcome_tables(given.rows) if given.tables is None else given.tables)
    if given.differences:
        write_csv(out / "differences.csv", given.differences)
        tables += difference_page_tables(given.differences)
    else:
        (out / "differences.csv").unlink(missing_ok=True)
    csv = [f"{given.name}.csv", "seeds.csv", *(["differences.csv"] if given.differences else [])]
    template = environment("prism_replay").get_template("outcomes.html")
    page = template.render(
        program=program, title=title, tables=tables, plots=plots, seeds=seeds_of(given), csv=csv
    )
    (out / "report.html").write_text(page, encoding="utf-8")


def seeds_of(given: Contents) -> int:
    """Returns the number of seeds of each point, 1 for a single one."""
    return max((row.get("seeds", 1) for row in given.rows), default=1)
