"""Terminal tables of outcomes under several policies and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from prism_replay.intervals import Interval, interval
from prism_replay.outcomes import METRICS, Rows, SeedGroup, sweep_rows
from prism_replay.report.console import new_table
from prism_replay.report.page import RATE_HEADS, milliseconds, percent, rate_cells
from prism_replay.results import LABELS, Throughput
from prism_replay.results import METRICS as LATENCIES


def outcome_table(groups: Sequence[SeedGroup], keys: Sequence[str]) -> Table:
    """Returns a table with a row per group, at the SLO scale nearest to 1."""
    simulated = any(outcome.busy is not None for group in groups for outcome in group.outcomes)
    table = new_table(None, *keys, "TTFT", "TPOT", "E2E", "all", *(["busy"] if simulated else []))
    for group in groups:
        heads = [str(group.changes[key]) for key in keys]
        if group.problem:
            table.add_row(*heads, group.problem.rpartition(": ")[2])
            continue
        many = len(group.outcomes) > 1
        cells = [
            shown(group.attainment(metric), many=many) if group.judges(metric) else "-"
            for metric in METRICS
        ]
        if simulated:
            busy = interval([outcome.busy or 0.0 for outcome in group.outcomes])
            cells.append(shown(busy, many=many))
        table.add_row(*heads, *cells)
    return table


def tail_table(groups: Sequence[SeedGroup], keys: Sequence[str]) -> Table:
    """Returns a table of P99 latencies, throughput and normalised latency over all requests, with a
    row per group: means over its seeds. Leaves out requests per second, to fit 80 columns."""
    p99s = [f"P99 {LABELS[metric]}" for metric in LATENCIES]
    table = new_table(None, *keys, *p99s, *RATE_HEADS[3:])
    for group in groups:
        row = sweep_rows([group])[0]
        if row["problem"]:
            continue
        times = (milliseconds(row[f"{metric}_p99_ms"]) for metric in LATENCIES)
        rates = Throughput(**{name: row[name] for name in Throughput.__struct_fields__})
        cells = rate_cells(rates, row["normalized_latency"])
        table.add_row(*(str(group.changes[key]) for key in keys), *times, *cells[2:])
    return table


def difference_table(rows: Rows, keys: Sequence[str]) -> Table:
    """Returns a table of differences at the SLO scale nearest to 1. REQUIRES: there are some."""
    scales = {row["judged_at"] for row in rows if "judged_at" in row}
    scale = min(scales, key=lambda scale: abs(float(scale) - 1), default=None)
    title = f"Difference from {rows[0]['against']} over common seeds, in points"
    table = new_table(title, *keys, "TTFT", "TPOT", "E2E", "all")
    for row in rows:
        heads = [str(row[key]) for key in keys]
        if row["problem"]:
            table.add_row(*heads, row["problem"].rpartition(": ")[2], "", "", "")
        elif row["judged_at"] == scale:
            table.add_row(*heads, *(_difference(row, f"attainment_{metric}") for metric in METRICS))
    return table


def _difference(row: Mapping[str, Any], name: str) -> str:
    if row[name] is None:
        return "-"
    return f"{100 * row[name]:+.2f} ± {100 * row[f'{name}_ci95']:.2f}"


def shown(found: Interval, *, many: bool) -> str:
    """Returns a percentage with its interval."""
    return percent(found.mean) + (f" ± {100 * found.half_width:.1f}" if many else "")
