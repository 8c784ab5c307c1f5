"""Result files of a sweep and of a plan: HTML report, JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prism_replay.report.page import environment, percent
from prism_replay.report.theme import HALF, SERIES_MAX, draw, legend_below, new_axes, series_color
from prism_sim.output.results import heads_of, write_csv, write_json
from prism_sim.sweeps.intervals import interval
from prism_sim.sweeps.planning import CapacityPlan
from prism_sim.sweeps.points import PointOutcome, SeedGroup

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "all SLOs"}

Rows = Sequence[dict[str, Any]]
LinePoint = tuple[Any, float, float]
"""x, per cent, half-width of the interval (0: none)."""
Lines = Mapping[str, Sequence[LinePoint]]
"""Label -> points."""


def write_sweep(out: Path, groups: Sequence[SeedGroup], title: str) -> None:
    """Writes sweep.json, sweep.csv and report.html to `out`. The last varied key is the x axis."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    _write(out, "sweep", outcomes, sweep_rows(groups), title=title, plots=figures(groups))


def write_plans(out: Path, plans: Sequence[CapacityPlan], title: str) -> None:
    """Writes plan.json, plan.csv and report.html to `out`."""
    plots = draw({"plan": partial(_plan_figure, plans)})
    _write(out, "plan", plans, plan_rows(plans), title=title, plots=plots)


def _write(
    out: Path, name: str, found: Any, rows: Rows, *, title: str, plots: Mapping[str, str]
) -> None:
    write_json(out / f"{name}.json", found)
    write_csv(out / f"{name}.csv", rows)
    heads = heads_of(rows)
    cells = [[_cell(head, row.get(head)) for head in heads] for row in rows]
    template = environment("prism_sim", "prism_replay").get_template("sweep.html")
    page = template.render(title=title, heads=heads, rows=cells, plots=plots)
    (out / "report.html").write_text(page, encoding="utf-8")


def sweep_rows(groups: Sequence[SeedGroup]) -> list[dict[str, Any]]:
    """Returns a row per group and SLO scale: means over the seeds, and half-widths if there are
    several seeds."""
    rows = []
    for group in groups:
        summary = group.outcomes[0].summary
        if summary is None or group.problem:
            rows.append({**group.changes, "problem": group.problem})
            continue
        for scale in summary.total.attainment:
            found = [_measured(o, scale) for o in group.outcomes]
            rows.append({**group.changes, "judged_at": scale, **_over_seeds(found), "problem": ""})
    return rows


def _measured(outcome: PointOutcome, scale: str) -> dict[str, float | None]:
    """Returns the values of one point. REQUIRES: it was simulated."""
    summary = outcome.summary
    assert summary is not None
    found = summary.total.attainment[scale]
    return {
        **{f"attainment_{m}": getattr(found, m) for m in METRICS},
        "ttft_p99_ms": summary.total.ttft_ms.p99,
        "tpot_p99_ms": summary.total.tpot_ms.p99,
        "requests_per_s": summary.requests_per_s,
        "busy": outcome.busy,
        "activations": outcome.counts.get("active", 0),
        "migrations": outcome.counts.get("migrated", 0),
        "retractions": outcome.counts.get("retractions", 0),
        "unserved": summary.total.errors.get("unserved", 0),
    }


def _over_seeds(found: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Returns means and half-widths, or the values themselves for a single seed."""
    if len(found) == 1:
        return dict(found[0])
    row: dict[str, Any] = {"seeds": len(found)}
    for name in found[0]:
        values = [value for one in found if (value := one[name]) is not None]
        known = interval(values) if values else None
        row[name] = known and known.mean
        row[f"{name}_ci95"] = known and known.half_width
    return row


def plan_rows(plans: Sequence[CapacityPlan]) -> list[dict[str, Any]]:
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
    label = f"requests within their SLO, {METRICS[metric]} (%)"
    return _attainment_figure(f"{METRICS[metric]} attainment", axis, label, lines)


def _plan_figure(plans: Sequence[CapacityPlan]) -> Any:
    lines = {
        plan.policy: [
            (g, 100 * v, 100 * plan.half_widths.get(g, 0.0)) for g, v in sorted(plan.tried.items())
        ]
        for plan in plans
    }
    target = 100 * plans[0].target
    return _attainment_figure("GPUs tried", "GPUs", "attainment (%)", lines, target)


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
        axes.axhline(target, linestyle=":", linewidth=1.2)
    axes.set_ylim(0, 103)
    legend_below(figure, 4)
    return figure


def _axis_value(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value)


def _cell(head: str, value: Any) -> str:
    if value is None:
        return "-"
    if head.startswith("attainment"):
        return percent(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
