"""Results of `prism-replay compare`: files, plots and terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from prism_replay.intervals import Interval, interval
from prism_replay.outcomes import (
    METRICS,
    SeedGroup,
    difference_rows,
    seed_rows,
    sweep_rows,
)
from prism_replay.report.outcome_page import Contents, write_outcomes
from prism_replay.report.outcome_tables import difference_table, outcome_table, tail_table
from prism_replay.report.theme import (
    HALF,
    MARKERS,
    draw,
    legend_below,
    log_y,
    new_axes,
    series_color,
)

FLAT = 4
"""Number of policies up to which their names fit side by side."""
KEYS = ("trace", "policy")
LATENCIES = {"ttft": "P99 TTFT", "tpot": "P99 TPOT", "e2e": "P99 end to end"}


def write_comparison(out: Path, groups: Sequence[SeedGroup], against: str, title: str) -> None:
    """Writes compare.json, compare.csv, seeds.csv, report.html and, over several seeds,
    differences.csv to `out`."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    differences = difference_rows(groups, against)
    given = Contents("compare", outcomes, sweep_rows(groups), seed_rows(groups), differences)
    heading = f"{title}: {' and '.join(_traces(groups))}"
    write_outcomes(out, given, "prism-replay", heading, plots(groups))


def print_comparison(console: Console, groups: Sequence[SeedGroup], against: str) -> None:
    console.print(outcome_table(groups, KEYS))
    console.print(tail_table(groups, KEYS))
    if differences := difference_rows(groups, against):
        console.print(difference_table(differences, KEYS))


def plots(groups: Sequence[SeedGroup]) -> dict[str, str]:
    """Returns name -> SVG: for each trace attainment by policy, and P99 latencies by policy."""
    made = {}
    for number, trace in enumerate(_traces(groups)):
        own = [group for group in groups if group.changes["trace"] == trace]
        made[f"attainment{number}"] = partial(_attainments, trace, own)
        made[f"latencies{number}"] = partial(_latencies, trace, own)
    return draw(made)


def _traces(groups: Sequence[SeedGroup]) -> list[str]:
    return list(dict.fromkeys(str(group.changes["trace"]) for group in groups))


def _attainments(trace: str, groups: Sequence[SeedGroup]) -> Any:
    figure, axes = new_axes(f"SLO attainment, {trace}", "", "requests within their SLO (%)", HALF)
    judged = [m for m in METRICS if all(group.judges(m) for group in groups)]
    found = {metric: [group.attainment(metric) for group in groups] for metric in judged}
    bars = {
        METRICS[metric]: [Interval(100 * each.mean, 100 * each.half_width) for each in of_metric]
        for metric, of_metric in found.items()
    }
    if not bars:
        return None
    _draw_bars(axes, groups, bars, [MARKERS[metric] for metric in judged])
    axes.set_ylim(0, 106)
    legend_below(figure, len(bars))
    return figure


def _latencies(trace: str, groups: Sequence[SeedGroup]) -> Any:
    figure, axes = new_axes(f"P99 latency, {trace}", "", "P99 latency (s, log)", HALF)
    bars = {
        label: [_p99_s(group, metric) for group in groups] for metric, label in LATENCIES.items()
    }
    _draw_bars(axes, groups, bars, [series_color(number) for number in range(len(bars))])
    log_y(axes)
    legend_below(figure, len(bars))
    return figure


def _p99_s(group: SeedGroup, metric: str) -> Interval:
    """Returns the mean P99 over the seeds in which requests have finished."""
    summaries = [outcome.summary for outcome in group.outcomes if outcome.summary]
    latencies = [getattr(summary.total, f"{metric}_ms").p99 for summary in summaries]
    known = [value_ms / 1000 for value_ms in latencies if value_ms is not None]
    return interval(known) if known else Interval(float("nan"), 0.0)


def _draw_bars(
    axes: Any,
    groups: Sequence[SeedGroup],
    bars: dict[str, list[Interval]],
    colors: Sequence[str],
) -> None:
    """Draws a bar for each policy and label, with the confidence interval of its mean."""
    places = np.arange(len(groups), dtype=np.float64)
    width = 0.8 / len(bars)
    for number, (label, found) in enumerate(bars.items()):
        middles = places + (number - (len(bars) - 1) / 2) * width
        means, halves = zip(*found, strict=True)
        axes.bar(middles, means, 0.9 * width, color=colors[number], label=label)
        if any(halves):
            axes.errorbar(middles, means, yerr=halves, fmt="none", ecolor=MARKERS["fg"], capsize=2)
    labels = [str(group.changes["policy"]) for group in groups]
    axes.set_xticks(places, labels, rotation=20 if len(labels) > FLAT else 0)
    axes.grid(visible=False, axis="x")
