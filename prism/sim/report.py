"""The HTML pages of a run, a sweep and a plan; of the last two also their JSON and CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prism.replay.report import environment, percent, sections
from prism.replay.results import Results
from prism.replay.theme import HALF, SERIES_MAX, draw, legend_below, new_axes, series_color
from prism.sim.planning import CapacityPlan
from prism.sim.points import PointOutcome
from prism.sim.results import SimResults, heads_of, write_csv, write_json

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "all SLOs"}
DECISIONS_SHOWN = 200

Rows = Sequence[dict[str, Any]]
Lines = Mapping[str, Sequence[tuple[Any, float]]]
"""Label -> (x, per cent) of its points."""


def write_report(path: Path, found: SimResults, replay: Results) -> None:
    """One run's page, everything inline. `replay`: the same run in prism-replay's form."""
    page = environment("prism.sim", "prism.replay").get_template("simulation.html")
    shown = sections(replay)
    # simulated engines count no page maps
    shown["plots"].pop("maps", None)
    decisions = found.decisions[:DECISIONS_SHOWN]
    path.write_text(page.render(**shown, sim=found, decisions=decisions), encoding="utf-8")


def write_sweep(out: Path, outcomes: Sequence[PointOutcome], title: str) -> None:
    """sweep.json, sweep.csv and report.html in `out`. The last varied key is the x axis."""
    _write(out, "sweep", outcomes, sweep_rows(outcomes), title=title, plots=figures(outcomes))


def write_plans(out: Path, plans: Sequence[CapacityPlan], title: str) -> None:
    """plan.json, plan.csv and report.html in `out`."""
    plots = draw({"plan": partial(_plan_figure, plans)})
    _write(out, "plan", plans, plan_rows(plans), title=title, plots=plots)


def _write(
    out: Path, name: str, found: Any, rows: Rows, *, title: str, plots: Mapping[str, str]
) -> None:
    write_json(out / f"{name}.json", found)
    write_csv(out / f"{name}.csv", rows)
    heads = heads_of(rows)
    cells = [[_cell(head, row.get(head)) for head in heads] for row in rows]
    template = environment("prism.sim", "prism.replay").get_template("sweep.html")
    page = template.render(title=title, heads=heads, rows=cells, plots=plots)
    (out / "report.html").write_text(page, encoding="utf-8")


def sweep_rows(outcomes: Sequence[PointOutcome]) -> list[dict[str, Any]]:
    """A row per point and SLO scale."""
    rows = []
    for outcome in outcomes:
        summary = outcome.summary
        if summary is None:
            rows.append({**outcome.changes, "problem": outcome.problem})
            continue
        for scale, found in summary.total.attainment.items():
            rows.append(
                {
                    **outcome.changes,
                    "judged_at": scale,
                    **{f"attainment_{m}": getattr(found, m) for m in METRICS},
                    "ttft_p99_ms": summary.total.ttft_ms.p99,
                    "tpot_p99_ms": summary.total.tpot_ms.p99,
                    "requests_per_s": summary.requests_per_s,
                    "busy": outcome.busy,
                    "activations": outcome.counts.get("active", 0),
                    "migrations": outcome.counts.get("migrated", 0),
                    "retractions": outcome.counts.get("retractions", 0),
                    "unserved": summary.total.errors.get("unserved", 0),
                    "problem": "",
                }
            )
    return rows


def plan_rows(plans: Sequence[CapacityPlan]) -> list[dict[str, Any]]:
    return [
        {
            "policy": plan.policy,
            "gpus": plan.gpus if plan.gpus is not None else f"{max(plan.tried)}+",
            "attainment": plan.attainment,
            "metric": plan.metric,
            "target": plan.target,
            "points": len(plan.tried),
            "tried": " ".join(f"{g}:{value:.4f}" for g, value in sorted(plan.tried.items())),
        }
        for plan in plans
    ]


def figures(outcomes: Sequence[PointOutcome]) -> dict[str, str]:
    """Attainment over the last varied key, a line for each combination of the others."""
    keys = list(outcomes[0].changes) if outcomes else []
    simulated = [o for o in outcomes if o.summary is not None]
    if not keys or not simulated:
        return {}
    *others, axis = keys
    plots = {m: partial(_sweep_figure, simulated, others, axis, m) for m in METRICS}
    return draw(plots)


def _sweep_figure(
    outcomes: Sequence[PointOutcome], others: Sequence[str], axis: str, metric: str
) -> Any:
    lines: dict[str, list[tuple[Any, float]]] = {}
    for outcome in outcomes:
        assert outcome.summary is not None
        name = ", ".join(str(outcome.changes[key]) for key in others) or METRICS[metric]
        scale = min(outcome.summary.total.attainment, key=lambda s: abs(float(s) - 1))
        value = 100 * outcome.attainment(metric, scale)
        lines.setdefault(name, []).append((_axis_value(outcome.changes[axis]), value))
    label = f"requests within their SLO, {METRICS[metric]} (%)"
    return _attainment_figure(f"{METRICS[metric]} attainment", axis, label, lines)


def _plan_figure(plans: Sequence[CapacityPlan]) -> Any:
    lines = {plan.policy: [(g, 100 * v) for g, v in sorted(plan.tried.items())] for plan in plans}
    target = 100 * plans[0].target
    return _attainment_figure("GPUs tried", "GPUs", "attainment (%)", lines, target)


def _attainment_figure(
    title: str, xlabel: str, ylabel: str, lines: Lines, target: float | None = None
) -> Any:
    figure, axes = new_axes(title, xlabel, ylabel, HALF)
    for number, (label, points) in enumerate(lines.items()):
        xs, ys = zip(*points, strict=True)
        color = series_color(min(number, SERIES_MAX - 1))
        axes.plot(xs, ys, marker="o", color=color, label=label)
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
