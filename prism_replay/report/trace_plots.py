"""Figures of a trace, after Prism's Figures 1 and 2. Dotted lines are Prism's published values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prism_replay.report import theme
from prism_replay.report.stats import (
    ACTIVE_STEP_S,
    ACTIVE_WINDOW_S,
    TraceStats,
    active_matrix,
    arrivals_s,
    by_model,
)
from prism_replay.trace import Trace

SHOWN_MODELS = 5
BINS = 60
PUBLISHED_ACTIVE = (23.0, 50.0)
TITLES = {
    "median_idle_s": ("Median idle interval", "seconds (log)"),
    "idle_per_hour": ("Idle intervals above 10 s", "intervals per hour"),
    "rate_cv": ("CV of requests per minute", "standard deviation / mean"),
    "gap_cv": ("CV of times between requests", "standard deviation / mean"),
}
"""Field of ModelStats -> title and x label of its distribution."""


def trace_plots(trace: Trace, stats: TraceStats) -> dict[str, str]:
    """Returns name -> SVG of each figure that has data."""
    plots = {
        "popularity": lambda: popularity(stats),
        # Figures 2b, 2c and 2d
        "idle": lambda: model_cdf(stats, "median_idle_s", (30, 80)),
        "idles": lambda: model_cdf(stats, "idle_per_hour", (40, 100)),
        "cv": lambda: model_cdf(stats, "rate_cv", (0.5, 1)),
        "active": lambda: active(trace, stats),
        "rates": lambda: rates(trace, stats),
        "lengths": lambda: lengths(trace),
        # Poisson arrivals have 1.
        "gaps": lambda: model_cdf(stats, "gap_cv", (1,)),
    }
    return theme.draw(plots)


def popularity(stats: TraceStats) -> Any:
    """Draws the cumulated share of requests of the most popular models (Figure 2a)."""
    figure, axes = theme.new_axes(
        "Popularity", "models, most popular first (%)", "requests (%)", theme.HALF
    )
    shares = np.cumsum([0.0, *(model.share for model in stats.models)]) * 100
    axes.plot(np.linspace(0, 100, len(shares)), shares, color=theme.series_color(0))
    axes.plot([40], [75], marker="x", color=theme.MARKERS["muted"], linestyle="none")
    axes.annotate("published", (40, 75), xytext=(6, -12), textcoords="offset points", fontsize=8)
    axes.set(xlim=(0, 100), ylim=(0, 102))
    return figure


def active(trace: Trace, stats: TraceStats) -> Any:
    """Draws the share of models with a request in the last 2 minutes, over time."""
    times_s = [arrivals_s(requests) for requests in by_model(trace).values()]
    percents = active_matrix(times_s, stats.duration_s).mean(axis=0) * 100
    start_s = min(ACTIVE_WINDOW_S, stats.duration_s)
    hours = (start_s + ACTIVE_STEP_S * np.arange(len(percents))) / 3600
    figure, axes = theme.new_axes("Active models", "hours", "models (%)", theme.HALF)
    axes.plot(hours, percents, color=theme.series_color(1))
    for level in PUBLISHED_ACTIVE:
        axes.axhline(level, color=theme.MARKERS["muted"], linestyle=":", linewidth=1.2)
    axes.set_ylim(0, 102)
    return figure


def rates(trace: Trace, stats: TraceStats) -> Any:
    """Draws the requests per minute of the most popular models (Figure 1b)."""
    figure, axes = theme.new_axes(
        "Rates of the most popular models", "hours", "requests/min", theme.HALF
    )
    edges_s = np.linspace(0, stats.duration_s, BINS + 1)
    for number, (name, requests) in enumerate(list(by_model(trace).items())[:SHOWN_MODELS]):
        counts = np.histogram(arrivals_s(requests), bins=edges_s)[0]
        per_minute = counts * 60 / (edges_s[1] - edges_s[0])
        axes.stairs(per_minute, edges_s / 3600, color=theme.series_color(number), label=name)
    axes.set_ylim(bottom=0)
    theme.legend_below(figure, 3)
    return figure


def lengths(trace: Trace) -> Any:
    figure, axes = theme.new_axes(
        "Tokens per request", "tokens (log)", "requests at or below (%)", theme.HALF
    )
    theme.draw_cdf(
        axes, [request.input_length for request in trace], theme.series_color(0), "input"
    )
    theme.draw_cdf(
        axes, [request.output_length for request in trace], theme.series_color(1), "output"
    )
    theme.log_x(axes)
    theme.legend_below(figure, 2)
    return figure


def model_cdf(stats: TraceStats, key: str, marks: Sequence[float]) -> Any:
    """Draws the distribution over the models of a field in TITLES, with dotted lines at `marks`."""
    values = [value for m in stats.models if (value := getattr(m, key)) is not None]
    if not values:
        return None
    title, xlabel = TITLES[key]
    figure, axes = theme.new_axes(title, xlabel, "models at or below (%)", theme.HALF)
    theme.draw_cdf(axes, values, theme.series_color(0), None)
    for mark in marks:
        axes.axvline(mark, color=theme.MARKERS["muted"], linestyle=":", linewidth=1.2)
    if "log" in xlabel:
        theme.log_x(axes)
    axes.set_ylim(0, 102)
    return figure
