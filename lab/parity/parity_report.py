"""Self-contained HTML page of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.parity import console
from lab.parity.compare import ParityOutcome
from lab.parity.parity_results import ParityResults, RequestLatencies
from lab.parity.runs import Placed
from prism_replay.report.page import environment
from prism_replay.report.theme import RC, SERIES_MAX, draw, new_axes, series_color

SIZE = (6.2, 3.6)
SHOWN = 200
MARKS = {"activate": "^", "evict": "v", "migrate": ">"}


def write_report(path: Path, outcome: ParityOutcome) -> None:
    path.write_text(render(outcome), encoding="utf-8")


def render(outcome: ParityOutcome) -> str:
    results = outcome.results
    page = environment("lab.parity", "prism_replay").get_template("parity.html")
    return page.render(
        results=results,
        checks=list(console.checks(results)),
        decisions=list(console.decisions(results)),
        class_heads=console.CLASS_HEADS,
        decision_heads=console.DECISION_HEADS,
        figures=list(console.figures(results.figures)),
        figure_heads=console.FIGURE_HEADS,
        classes=console.explained(results),
        shown=SHOWN,
        plots=plots(outcome),
    )


def plots(outcome: ParityOutcome) -> dict[str, str]:
    return draw(
        {
            "e2e": partial(_scatter, outcome.results, "e2e_ms", "End to end"),
            "ttft": partial(_scatter, outcome.results, "ttft_ms", "Time to first token"),
            "decisions": partial(_timeline, outcome),
        }
    )


def _scatter(results: ParityResults, latency: str, title: str) -> Any:
    """Draws a point per request; on the line, both latencies are equal."""
    figure, axes = new_axes(f"{title} of each request", "live (s)", "simulated (s)", SIZE)
    models = sorted({sample.model for sample in results.samples})
    longest_s = 0.0
    for number, model in enumerate(models):
        own = [s for s in results.samples if s.model == model]
        points = _points(own, latency)
        longest_s = max([longest_s, *(max(point) for point in points)])
        label = model if number < SERIES_MAX else None
        color = series_color(number)
        axes.scatter(*zip(*points, strict=True), s=9, color=color, label=label) if points else None
    axes.plot([0, longest_s], [0, longest_s], linewidth=0.8, color=RC["xtick.color"])
    axes.legend(loc="best")
    return figure


def _points(samples: Sequence[RequestLatencies], latency: str) -> list[tuple[float, float]]:
    pairs = [(getattr(s, f"live_{latency}"), getattr(s, f"simulated_{latency}")) for s in samples]
    return [(a / 1000, b / 1000) for a, b in pairs if a is not None and b is not None]


def _timeline(outcome: ParityOutcome) -> Any:
    """Draws the actions of the cluster schedulers, with two rows for each model."""
    models = sorted({p.model for p in (*outcome.live.placements, *outcome.simulated.placements)})
    size = (2 * SIZE[0], 1.0 + 0.45 * max(2, len(models)))
    figure, axes = new_axes("Placement (above: live, below: simulated)", "seconds", "", size)
    for world, shift in ((outcome.live.placements, 0.17), (outcome.simulated.placements, -0.17)):
        for kind, mark in MARKS.items():
            _draw(axes, [p for p in world if p.kind == kind], models, shift, mark)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(-0.6, len(models) - 0.4)
    return figure


def _draw(
    axes: Any, found: Sequence[Placed], models: Sequence[str], shift: float, mark: str
) -> None:
    times_s = [max(0.0, placement.time_s) for placement in found]
    rows = [models.index(placement.model) + shift for placement in found]
    axes.scatter(times_s, rows, marker=mark, s=26, color=series_color(0 if shift > 0 else 1))
