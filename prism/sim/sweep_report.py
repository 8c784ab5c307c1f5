"""What a sweep or a plan leaves: JSON, CSV and one HTML page with a figure per metric."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec

from prism.replay.report import environment, percent
from prism.replay.theme import RC, SERIES_MAX, new_axes, series_color, to_svg
from prism.sim.planning import Plan
from prism.sim.points import Outcome

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "all SLOs"}
SIZE = (6.2, 3.3)


def write_sweep(out: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """sweep.json, sweep.csv and report.html in `out`. The last varied key is the x axis."""
    (out / "sweep.json").write_bytes(_pretty(list(outcomes)))
    rows = sweep_rows(outcomes)
    write_csv(out / "sweep.csv", rows)
    (out / "report.html").write_text(page(title, rows, figures(outcomes)), encoding="utf-8")


def write_plans(out: Path, plans: Sequence[Plan], title: str) -> None:
    """plan.json, plan.csv and report.html in `out`."""
    (out / "plan.json").write_bytes(_pretty(list(plans)))
    rows = plan_rows(plans)
    write_csv(out / "plan.csv", rows)
    with mpl.rc_context(RC):
        figure = _plan_figure(plans)
    (out / "report.html").write_text(page(title, rows, {"plan": figure}), encoding="utf-8")


def sweep_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
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


def plan_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
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


def figures(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Attainment over the last varied key, a line for each combination of the others."""
    keys = list(outcomes[0].changes) if outcomes else []
    simulated = [o for o in outcomes if o.summary is not None]
    if not keys or not simulated:
        return {}
    *others, axis = keys
    with mpl.rc_context(RC):
        return {metric: _sweep_figure(simulated, others, axis, metric) for metric in METRICS}


def _sweep_figure(
    outcomes: Sequence[Outcome], others: Sequence[str], axis: str, metric: str
) -> str:
    label = f"requests within their SLO, {METRICS[metric]} (%)"
    figure, axes = new_axes(f"{METRICS[metric]} attainment", axis, label, SIZE)
    lines: dict[str, list[tuple[Any, float]]] = {}
    for outcome in outcomes:
        assert outcome.summary is not None
        name = ", ".join(str(outcome.changes[key]) for key in others) or METRICS[metric]
        scale = min(outcome.summary.total.attainment, key=lambda s: abs(float(s) - 1))
        value = 100 * outcome.attainment(metric, scale)
        lines.setdefault(name, []).append((outcome.changes[axis], value))
    for number, (name, points) in enumerate(lines.items()):
        xs, ys = zip(*points, strict=True)
        color = series_color(min(number, SERIES_MAX - 1))
        axes.plot([_axis_value(x) for x in xs], ys, marker="o", color=color, label=name)
    axes.set_ylim(0, 103)
    figure.legend(loc="outside lower center", ncols=4)
    return to_svg(figure, metric)


def _plan_figure(plans: Sequence[Plan]) -> str:
    figure, axes = new_axes("GPUs tried", "GPUs", "attainment (%)", SIZE)
    for number, plan in enumerate(plans):
        points = sorted(plan.tried.items())
        color = series_color(min(number, SERIES_MAX - 1))
        values = [100 * value for _, value in points]
        axes.plot([g for g, _ in points], values, marker="o", color=color, label=plan.policy)
    axes.axhline(100 * plans[0].target, linestyle=":", linewidth=1.2)
    axes.set_ylim(0, 103)
    figure.legend(loc="outside lower center", ncols=4)
    return to_svg(figure, "plan")


def _axis_value(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value)


def page(title: str, rows: Sequence[Mapping[str, Any]], plots: Mapping[str, str]) -> str:
    """The HTML page: figures, then the table."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(head, row.get(head)) for head in heads] for row in rows]
    template = environment("prism.sim", "prism.replay").get_template("sweep.html")
    return template.render(title=title, heads=heads, rows=cells, plots=plots)


def _cell(head: str, value: Any) -> str:
    if value is None:
        return "-"
    if head.startswith("attainment"):
        return percent(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    heads = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
