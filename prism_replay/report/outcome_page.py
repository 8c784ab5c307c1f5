"""Result files of several outcomes: HTML report, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prism_replay.outcomes import Rows, heads_of, write_csv
from prism_replay.report.page import environment, percent
from prism_replay.results import write_json


class Contents(NamedTuple):
    """Contents of the files of one command."""

    name: str
    # For the JSON.
    found: Sequence[msgspec.Struct]
    rows: Rows
    seeds: Rows
    differences: Rows


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
    tables = [_table("", given.rows)]
    if given.differences:
        write_csv(out / "differences.csv", given.differences)
        against = given.differences[0]["against"]
        heading = f"Differences from {against} over common seeds"
        tables.append(_table(heading, given.differences))
    else:
        (out / "differences.csv").unlink(missing_ok=True)
    template = environment("prism_replay").get_template("outcomes.html")
    page = template.render(program=program, title=title, tables=tables, plots=plots)
    (out / "report.html").write_text(page, encoding="utf-8")


def _table(heading: str, rows: Rows) -> tuple[str, list[str], list[list[str]]]:
    heads = heads_of(rows)
    return heading, heads, [[_cell(head, row.get(head)) for head in heads] for row in rows]


def _cell(head: str, value: Any) -> str:
    if value is None:
        return "-"
    if head.startswith("attainment"):
        return percent(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
