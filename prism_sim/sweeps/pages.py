"""Result files of a sweep and of a plan: HTML report, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from prism_replay.outcomes import METRICS, Rows, SeedGroup, seed_rows, sweep_rows
from prism_replay.report.outcome_page import Contents, write_outcomes
from prism_replay.report.page import percent
from prism_replay.report.page_tables import SHORT, PageTable
from prism_replay.report.theme import (
    HALF,
    MARKERS,
    SERIES_MAX,
    draw,
    legend_below,
    new_axes,
    series_color,
)
from prism_sim.sweeps.planning import CapacityPlan, gpus_text, tried_groups

LinePoint = tuple[Any, float, float]
"""x, per cent, half-width of the interval (0: none)."""
Lines = Mapping[str, Sequence[LinePoint]]
"""Label -> points."""


def write_sweep(
    out: Path, groups: Sequence[SeedGroup], differences: Rows, title: str, name: str = "sweep"
) -> None:
    """Writes NAME.json, NAME.csv, seeds.csv, report.html and, if policies differ over several
    seeds, differences.csv to `out`. The last varied key is the x axis."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    given = Contents(name, outcomes, sweep_rows(groups), seed_rows(groups), differences)
    write_outcomes(out, given, "prism-sim", title, figures(groups))


def write_plans(out: Path, plans: Sequence[CapacityPlan], differences: Rows, title: str) -> None:
    """Writes the same files for a plan."""
    plots = draw({"plan": partial(_plan_figure, plans)})
    seeds = seed_rows(tried_groups(plans))
    tables = [plan_page_table(plans)]
    given = Contents("plan", plans, plan_rows(plans), seeds, differences, tables)
    write_outcomes(out, given, "prism-sim", title, plots)


def plan_rows(plans: Sequence[CapacityPlan]) -> Rows:
    return [
        {
            "policy": plan.policy,
            "gpus": plan.gpus if plan.gpus is not None else f"{max(plan.tried)}+",
            "attainment": plan.attainment,
            **_plan_interval(plan),
            "metric": plan.metric,
            "target": plan.target,
            "points": len(plan.tried),
            "tried": " ".join(f"{g}:{value:.4f}" for g, value in sorted(plan.tried.items())),
        }
        for plan in plans
    ]


def plan_page_table(plans: Sequence[CapacityPlan]) -> PageTable:
    heads = ("policy", "GPUs", "attainment", "tried")
    rows = [
        (
            plan.policy,
            f"{plan.gpus}" if plan.gpus is not None else f"more than {max(plan.tried)}",
            _shown(plan, plan.gpus or max(plan.tried)),
            ", ".join(f"{gpus_text(gpus)}: {_shown(plan, gpus)}" for gpus in sorted(plan.tried)),
        )
        for plan in plans
    ]
    return PageTable("GPUs of each policy", heads, rows, text_last=True)


def _shown(plan: CapacityPlan, gpus: int) -> str:
    half_width = plan.half_widths.get(gpus)
    found = percent(plan.tried[gpus])
    return found if half_width is None else f"{found} ± {100 * half_width:.1f}"


def _plan_interval(plan: CapacityPlan) -> dict[str, Any]:
    if plan.seeds == 1:
        return {}
    at = plan.gpus if plan.gpus is not None else max(plan.tried)
    return {"attainment_ci95": plan.half_widths[at], "seeds": plan.seeds}


def figures(groups: Sequence[SeedGroup]) -> dict[str, str]:
    """Returns plots of attainment over the last varied key, with a line for each combination of the
    other keys."""
    keys = list(groups[0].changes) if groups else []
    simulated = [group for group in groups if not group.problem]
    if not keys or not simulated:
        return {}
    *others, axis = keys
    plots = {m: partial(_sweep_figure, simulated, others, axis, m) for m in METRICS}
    return draw(plots)


def _sweep_figure(
    groups: Sequence[SeedGroup], others: Sequence[str], axis: str, metric: str
) -> Any:
    lines: dict[str, list[LinePoint]] = {}
    for group in groups:
        name = ", ".join(str(group.changes[key]) for key in others) or METRICS[metric]
        found = group.attainment(metric)
        x = _axis_value(group.changes[axis])
        lines.setdefault(name, []).append((x, 100 * found.mean, 100 * found.half_width))
    label = _attainment_label(metric)
    axis = SHORT.get(axis, axis)
    return _attainment_figure(f"{_attainment_of(metric)} by {axis}", axis, label, lines)


def _attainment_of(metric: str) -> str:
    return "Attainment of all SLOs" if metric == "all" else f"{METRICS[metric]} attainment"


def _attainment_label(metric: str) -> str:
    return f"requests within {METRICS[metric]}{'' if metric == 'all' else ' SLO'} (%)"


def _plan_figure(plans: Sequence[CapacityPlan]) -> Any:
    lines = {
        plan.policy: [
            (g, 100 * v, 100 * plan.half_widths.get(g, 0.0)) for g, v in sorted(plan.tried.items())
        ]
        for plan in plans
    }
    title = f"{_attainment_of(plans[0].metric)} by number of GPUs"
    label = _attainment_label(plans[0].metric)
    return _attainment_figure(title, "GPUs", label, lines, 100 * plans[0].target)


def _attainment_figure(
    title: str, xlabel: str, ylabel: str, lines: Lines, target: float | None = None
) -> Any:
    figure, axes = new_axes(title, xlabel, ylabel, HALF)
    for number, (label, points) in enumerate(lines.items()):
        xs, ys, halves = zip(*points, strict=True)
        color = series_color(min(number, SERIES_MAX - 1))
        axes.plot(xs, ys, marker="o", color=color, label=label)
        if any(halves):
            axes.errorbar(xs, ys, yerr=halves, fmt="none", ecolor=color, capsize=3)
    if target is not None:
        style = {"color": MARKERS["fg"], "linestyle": ":", "linewidth": 1.2}
        axes.axhline(target, label=f"target, {target:g} %", **style)
    if all(isinstance(x, int) for points in lines.values() for x, *_ in points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 103)
    legend_below(figure, 4)
    return figure


def _axis_value(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value)
