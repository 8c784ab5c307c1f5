"""Tables of a page about several outcomes. They have fewer columns than the CSV, named in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from prism_replay.outcomes import ENDS, METRICS, Rows, heads_of
from prism_replay.report.page import factor, milliseconds, percent

Row = Mapping[str, Any]
SHORT = {"gpus": "GPUs", "gpus.count": "GPUs"}
"""Key of a point -> its head. The heads of other keys are the keys of the YAML."""
ATTAINMENTS = {f"attainment_{metric}": label for metric, label in METRICS.items()}
LATENCIES = {"ttft_p99_ms": "P99 TTFT", "tpot_p99_ms": "P99 TPOT", "e2e_p99_ms": "P99 E2E"}
RATES = {
    "normalized_latency": "E2E / alone",
    "requests_per_s": "req/s",
    "output_tokens_per_s": "output tok/s",
}
COUNTS = {
    "busy": "GPUs busy",
    "failed": "failed",
    **{code: code.replace("_", " ") for code in ENDS},
    **{name: name for name in ("activations", "migrations", "retractions")},
}
MET = "Requests within their SLO"


class PageTable(NamedTuple):
    heading: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Paragraphs below the table.
    notes: Sequence[str] = ()
    # True if the last column is text, which may be broken into lines.
    text_last: bool = False


def outcome_tables(rows: Rows) -> list[PageTable]:
    """Returns the tables of attainment, of latency and throughput, and of other figures.

    Args:
        rows: Result of `sweep_rows`.
    """
    found = [row for row in rows if not row["problem"]]
    keys = keys_of(rows)
    problems = [_problem(row, keys) for row in rows if row["problem"]]
    scaled = {"judged_at": "SLO scale", **_seeds(found)}
    columns = {name: label for name, label in ATTAINMENTS.items() if _known(found, name)}
    met = _table(MET, found, keys, {**scaled, **columns}, shown)
    first = _first_scale(found, keys)
    times = {name: label for name, label in (LATENCIES | RATES).items() if _known(first, name)}
    counts = {name: label for name, label in COUNTS.items() if any(row[name] for row in first)}
    tables = [met._replace(notes=problems)]
    tables += [_table("Latency and throughput", first, keys, times, shown)] if times else []
    return tables + ([_table("Work and failures", first, keys, counts, shown)] if counts else [])


def difference_page_tables(rows: Rows) -> list[PageTable]:
    """Returns the tables of `difference_rows`, of which there is at least one."""
    found = [row for row in rows if not row["problem"]]
    keys = keys_of(rows)
    scaled = {name: label for name, label in ATTAINMENTS.items() if _known(found, name)}
    scaled = {"judged_at": "SLO scale", **scaled}
    heading = f"Differences from {rows[0]['against']} over common seeds"
    met = _table(f"{heading}: attainment in percentage points", found, keys, scaled, difference)
    first = _first_scale(found, keys)
    times = {name: label for name, label in LATENCIES.items() if _known(first, name)}
    tables = [met._replace(notes=[_problem(row, keys) for row in rows if row["problem"]])]
    latencies = _table(f"{heading}: latency", first, keys, times, difference)
    return [*tables, latencies] if times else tables


def keys_of(rows: Rows) -> list[str]:
    """Returns the keys that identify a point."""
    ends = {"judged_at", "problem", "against"}
    return list(takewhile(lambda head: head not in ends, heads_of(rows)))


def shown(row: Row, name: str) -> str:
    """Returns a value, with its interval if there are several seeds."""
    value, half = row[name], row.get(f"{name}_ci95")
    if value is None:
        return "-"
    if name in ATTAINMENTS or name == "busy":
        return percent(value) if half is None else f"{percent(value)} ± {100 * half:.1f}"
    if name in LATENCIES:
        return _interval(milliseconds, value, half)
    if name in COUNTS:
        return _interval(lambda count: f"{count:.3g}", value, half)
    return _interval(factor, value, half) if isinstance(value, float) else str(value)


def difference(row: Row, name: str) -> str:
    """Returns a mean difference with its sign and interval."""
    value, half = row[name], row.get(f"{name}_ci95")
    if value is None or half is None or isinstance(value, str):
        return str("-" if value is None else value)
    if name in ATTAINMENTS:
        return f"{round(100 * value, 1) + 0.0:+.1f} ± {100 * half:.1f}"
    return f"{'-' if value < 0 else '+'}{_interval(milliseconds, abs(value), half)}"


def _interval(show: Callable[[float], str], value: float, half: float | None) -> str:
    return show(value) if half is None else f"{show(value)} ± {show(half)}"


def _table(
    heading: str,
    rows: Rows,
    keys: Sequence[str],
    columns: Mapping[str, str],
    cell: Callable[[Row, str], str],
) -> PageTable:
    heads = [*(SHORT.get(key, key) for key in keys), *columns.values()]
    cells = [[*(str(row[k]) for k in keys), *(cell(row, name) for name in columns)] for row in rows]
    return PageTable(heading, heads, cells)


def _known(rows: Rows, name: str) -> bool:
    return any(row[name] is not None for row in rows)


def _seeds(rows: Rows) -> dict[str, str]:
    return {"seeds": "seeds"} if any("seeds" in row for row in rows) else {}


def _first_scale(rows: Rows, keys: Sequence[str]) -> Rows:
    """Returns a row per point. All columns but attainment are the same at each SLO scale."""
    return list({repr([row[key] for key in keys]): row for row in reversed(rows)}.values())[::-1]


def _problem(row: Row, keys: Sequence[str]) -> str:
    point = ", ".join(f"{SHORT.get(key, key)} {row[key]}" for key in keys)
    return f"Not simulated: {point}: {row['problem']}"
