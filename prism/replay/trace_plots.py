"""Figures of a trace, after Prism's Figures 1 and 2: SVG by name, dotted where it publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from numpy.typing import NDArray

from prism.replay.stats import (
    ACTIVE_STEP_S,
    ACTIVE_WINDOW_S,
    TraceStats,
    active_matrix,
    by_model,
)
from prism.replay.theme import MARKERS, RC, new_axes, series_color, to_svg
from prism.replay.trace import Trace

Floats = NDArray[np.float64]

HALF = (6.2, 3.3)
SHOWN_MODELS = 5
BINS = 60
PUBLISHED_ACTIVE = (23.0, 50.0)


def trace_plots(trace: Trace, stats: TraceStats) -> dict[str, str]:
    """Name -> SVG of every figure that has data."""
    plots: dict[str, Callable[[], Any]] = {
        "popularity": lambda: popularity(stats),
        "idle": lambda: idle_time(stats),
        "idles": lambda: idles_per_hour(stats),
        "cv": lambda: rate_cv(stats),
        "active": lambda: active(trace, stats),
        "rates": lambda: rates(trace, stats),
        "lengths": lambda: lengths(trace),
        "gaps": lambda: gap_cv(stats),
    }
    with mpl.rc_context(RC):
        drawn = {name: plot() for name, plot in plots.items()}
        return {name: to_svg(figure, name) for name, figure in drawn.items() if figure}


def popularity(stats: TraceStats) -> Any:
    """Requests that the most popular models give together (Figure 2a)."""
    figure, axes = new_axes("Popularity", "models, most popular first (%)", "requests (%)", HALF)
    shares = np.cumsum([0.0, *(model.share for model in stats.models)]) * 100
    axes.plot(np.linspace(0, 100, len(shares)), shares, color=series_color(0))
    axes.plot([40], [75], marker="x", color=MARKERS["muted"], linestyle="none")
    axes.annotate("published", (40, 75), xytext=(6, -12), textcoords="offset points", fontsize=8)
    axes.set(xlim=(0, 100), ylim=(0, 102))
    return figure


def idle_time(stats: TraceStats) -> Any:
    """Distribution of the models' median idle intervals (Figure 2b)."""
    values = [m.median_idle_s for m in stats.models if m.median_idle_s is not None]
    return _cdf("Median idle interval", "seconds (log)", values, marks=(30, 80), log=True)


def idles_per_hour(stats: TraceStats) -> Any:
    """Distribution of the models' idle intervals per hour (Figure 2c)."""
    values = [model.idle_per_hour for model in stats.models]
    return _cdf("Idle intervals above 10 s", "intervals per hour", values, marks=(40, 100))


def rate_cv(stats: TraceStats) -> Any:
    """Distribution of the models' CV of requests per minute (Figure 2d)."""
    values = [model.rate_cv for model in stats.models if model.rate_cv is not None]
    return _cdf("CV of requests per minute", "standard deviation / mean", values, marks=(0.5, 1))


def gap_cv(stats: TraceStats) -> Any:
    """Distribution of the models' CV of the times between requests; 1 is Poisson's."""
    values = [model.gap_cv for model in stats.models if model.gap_cv is not None]
    return _cdf("CV of times between requests", "standard deviation / mean", values, marks=(1,))


def active(trace: Trace, stats: TraceStats) -> Any:
    """Part of the models with a request in the last 2 minutes, over time."""
    arrivals_s = [_times_s(requests) for requests in by_model(trace).values()]
    part = active_matrix(arrivals_s, stats.duration_s).mean(axis=0) * 100
    start_s = min(ACTIVE_WINDOW_S, stats.duration_s)
    hours = (start_s + ACTIVE_STEP_S * np.arange(len(part))) / 3600
    figure, axes = new_axes("Active models", "hours", "models (%)", HALF)
    axes.plot(hours, part, color=series_color(1))
    for level in PUBLISHED_ACTIVE:
        axes.axhline(level, color=MARKERS["muted"], linestyle=":", linewidth=1.2)
    axes.set_ylim(0, 102)
    return figure


def rates(trace: Trace, stats: TraceStats) -> Any:
    """Requests per minute of the most popular models (Figure 1b)."""
    figure, axes = new_axes("Rates of the most popular models", "hours", "requests/min", HALF)
    edges_s = np.linspace(0, stats.duration_s, BINS + 1)
    for number, (name, requests) in enumerate(list(by_model(trace).items())[:SHOWN_MODELS]):
        counts = np.histogram(_times_s(requests), bins=edges_s)[0]
        per_minute = counts * 60 / (edges_s[1] - edges_s[0])
        axes.stairs(per_minute, edges_s / 3600, color=series_color(number), label=name)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def lengths(trace: Trace) -> Any:
    """Distributions of input and output tokens."""
    figure, axes = new_axes("Tokens per request", "tokens (log)", "requests at or below (%)", HALF)
    for number, (label, values) in enumerate(
        {
            "input": [request.input_length for request in trace],
            "output": [request.output_length for request in trace],
        }.items()
    ):
        _steps(axes, values, series_color(number), label)
    _log_x(axes)
    axes.legend(loc="lower right")
    return figure


def _cdf(
    title: str, xlabel: str, values: Sequence[float], marks: Sequence[float], log: bool = False
) -> Any:
    if not values:
        return None
    figure, axes = new_axes(title, xlabel, "models at or below (%)", HALF)
    _steps(axes, values, series_color(0), None)
    for mark in marks:
        axes.axvline(mark, color=MARKERS["muted"], linestyle=":", linewidth=1.2)
    if log:
        _log_x(axes)
    axes.set_ylim(0, 102)
    return figure


def _log_x(axes: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def _steps(axes: Any, values: Sequence[float], color: str, label: str | None) -> None:
    ordered = np.sort(np.asarray(values, dtype=float))
    points = np.concatenate([ordered[:1], ordered])
    axes.step(points, np.linspace(0, 100, len(points)), where="post", color=color, label=label)


def _times_s(requests: Trace) -> Floats:
    return np.array([request.arrival_s for request in requests])
