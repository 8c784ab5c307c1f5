"""Figures of a replay's report. Each function returns None without data to plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from prism_replay.lengths import Floats
from prism_replay.report import memory_plots, theme
from prism_replay.report.series import colors_of, series_of
from prism_replay.results import LABELS, Attainment, ReplayResults, RequestRecord, scale_key

MAP_BIN_S = 10.0
GROUPS_MAX = 4
"""Groups of bars that fit a figure of the usual height."""
OUTLIERS_PERCENT = 5
"""Percentage of a model's lowest latencies that may be left of the axis."""


def all_plots(results: ReplayResults) -> dict[str, str]:
    """Returns name -> SVG of each figure that has data, in the report's order."""
    return theme.draw(
        {
            "attainment": partial(attainment_per_model, results),
            "scales": partial(attainment_per_scale, results),
            "ttft": partial(latency_cdf, results, "ttft", "Time to first token (dotted: SLO)"),
            "tpot": partial(latency_cdf, results, "tpot", "Time per output token (dotted: SLO)"),
            "devices": partial(memory_plots.of_devices, results),
            "arrivals": partial(arrivals, results),
            "memory": partial(memory_plots.total, results),
            "maps": partial(map_rate, results),
        }
    )


def attainment_per_model(results: ReplayResults) -> Any:
    """Draws bars of the attainment per model and in total at the SLO scale nearest to 1."""
    scale = results.config.main_scale
    groups = {"total": results.summary.total, **results.summary.models}
    found = {name: group.attainment[scale_key(scale)] for name, group in groups.items()}
    if all(attainment.all is None for attainment in found.values()):
        return None
    width = theme.HALF[0] * (1 if len(found) <= GROUPS_MAX else 2)
    size = (width, max(theme.HALF[1], 0.8 + 0.62 * len(found)))
    title = f"SLO attainment per model, SLO scale {scale:g}"
    figure, axes = theme.new_axes(title, "requests within their SLO (%)", "", size)
    rows: Floats = np.arange(len(found), dtype=np.float64)[::-1]
    for number, metric in enumerate(LABELS):
        offsets = rows + 0.3 - 0.2 * number
        _draw_bars(axes, offsets, [_percent(a, metric) for a in found.values()], metric)
    axes.set_yticks(rows, list(found))
    axes.set_xlim(0, 106)
    axes.set_xticks(range(0, 101, 20))
    axes.grid(visible=False, axis="y")
    theme.legend_below(figure, 4)
    return figure


def attainment_per_scale(results: ReplayResults) -> Any:
    """Draws the total attainment over the SLO scales; None with a single scale."""
    scales = sorted(results.config.slo_scales)
    found = [results.summary.total.attainment[scale_key(scale)] for scale in scales]
    if len(scales) < 2 or all(attainment.all is None for attainment in found):
        return None
    xlabel, ylabel = "SLO scale (x the trace's SLOs)", "requests within their SLO (%)"
    figure, axes = theme.new_axes("SLO attainment over SLO scale", xlabel, ylabel, theme.HALF)
    for metric, label in LABELS.items():
        values = [_percent(attainment, metric) for attainment in found]
        style = {"linewidth": 2.4} if metric == "all" else {}
        axes.plot(scales, values, marker="o", color=theme.MARKERS[metric], label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axes.minorticks_off()
    axes.set_ylim(0, 103)
    theme.legend_below(figure, 4)
    return figure


def latency_cdf(results: ReplayResults, metric: str, title: str) -> Any:
    """Draws a CDF per model over a logarithmic axis in ms, with its SLO as a dotted line.

    The axis begins at a low percentile. Single answers whose tokens arrive together have a TPOT
    near 0, and would take most of a logarithmic axis.
    """
    names = series_of(results)
    groups, colors = _by_series(results, names), colors_of(names)
    series = {name: _latencies_ms(records, metric) for name, records in groups.items()}
    series = {name: values for name, values in series.items() if len(values)}
    if not series:
        return None
    figure, axes = theme.new_axes(
        title, f"{LABELS[metric]} (ms, log)", "requests at or below (%)", theme.HALF
    )
    for name, values in series.items():
        theme.draw_cdf(axes, values, colors[name], name)
    slos_ms = {name: slo for name in series if (slo := _common_slo_ms(groups[name], metric))}
    for name, slo_ms in slos_ms.items():
        axes.axvline(slo_ms, color=colors[name], linestyle=":", linewidth=1.2)
    lows_ms = [np.percentile(values, OUTLIERS_PERCENT) for values in series.values()]
    highs_ms = [values[-1] for values in series.values()]
    axes.set_xlim(
        min([*lows_ms, *slos_ms.values()]) / 1.3, max([*highs_ms, *slos_ms.values()]) * 1.3
    )
    theme.log_x(axes)
    axes.set_ylim(0, 101)
    theme.legend_below(figure, min(len(series), 4))
    return figure


def _latencies_ms(records: Sequence[RequestRecord], metric: str) -> Floats:
    """Returns the sorted latencies of finished requests, at least 10 us for the log axis."""
    found = [record.value_ms(metric) for record in records if record.ok]
    values: Floats = np.sort([value for value in found if value is not None])
    return np.maximum(values, 0.01)


def _common_slo_ms(records: Sequence[RequestRecord], metric: str) -> float | None:
    """Returns the SLO that all of `records` share; None if they differ."""
    slos_ms = {record.slo_ms(metric) for record in records}
    return slos_ms.pop() if len(slos_ms) == 1 else None


def arrivals(results: ReplayResults) -> Any:
    """Draws stacked bars of arrivals per time bin."""
    names = series_of(results)
    groups, colors = _by_series(results, names), colors_of(names)
    if not groups:
        return None
    bin_s = _bin_s(results.summary.duration_s)
    edges_s = np.arange(0, results.summary.duration_s + bin_s, bin_s)
    title, ylabel = "Arrivals per model", f"requests per {bin_s:g} s"
    figure, axes = theme.new_axes(title, "time since start (s)", ylabel, theme.HALF)
    below = np.zeros(len(edges_s) - 1)
    for name, records in groups.items():
        counts = np.histogram([r.arrival_s for r in records], bins=edges_s)[0].astype(float)
        axes.bar(
            edges_s[:-1],
            counts,
            bottom=below,
            width=bin_s * 0.9,
            align="edge",
            color=colors[name],
            label=name,
        )
        below += counts
    axes.grid(visible=False, axis="x")
    theme.legend_below(figure, min(len(groups), 4))
    return figure


def map_rate(results: ReplayResults) -> Any:
    """Draws the pages mapped and unmapped per minute, over bins of 10 s."""
    if len(results.samples) < 2 or results.counters is None or not results.counters.maps:
        return None
    edges_s = np.arange(0, results.samples[-1].t_s + MAP_BIN_S, MAP_BIN_S)
    times_s = [sample.t_s for sample in results.samples]
    title = "Page maps and unmaps"
    figure, axes = theme.new_axes(
        title, "time since start (s)", "operations per minute", theme.HALF
    )
    for name, shade in (("maps", theme.series_color(0)), ("unmaps", theme.series_color(1))):
        totals = [getattr(sample.counters, name) for sample in results.samples]
        rates = np.diff(np.interp(edges_s, times_s, totals)) * 60 / MAP_BIN_S
        axes.stairs(rates, edges_s, color=shade, label=name, linewidth=1.6)
    axes.set_ylim(bottom=0)
    theme.legend_below(figure, 2)
    return figure


def _draw_bars(axes: Any, offsets: Floats, values: Sequence[float], metric: str) -> None:
    axes.barh(offsets, values, height=0.18, color=theme.MARKERS[metric], label=LABELS[metric])
    for offset, value in zip(offsets, values, strict=True):
        if not np.isnan(value):
            axes.annotate(
                f"{value:.0f}",
                (value, offset),
                xytext=(3, 0),
                textcoords="offset points",
                va="center_baseline",
                fontsize=7,
            )


def _percent(attainment: Attainment, metric: str) -> float:
    value = getattr(attainment, metric)
    return float("nan") if value is None else float(value) * 100


def _by_series(results: ReplayResults, series: Mapping[str, str]) -> dict[str, list[RequestRecord]]:
    """Returns the records of each series; `series` is the result of `series_of`."""
    groups: dict[str, list[RequestRecord]] = {}
    for name in results.summary.models:
        chosen = [record for record in results.records if record.model == name]
        groups.setdefault(series[name], []).extend(chosen)
    return groups


def _bin_s(duration_s: float) -> float:
    """Returns a round bin width, at least 1 s, by which the run has at most 75 bins."""
    return next((b for b in (1, 2, 5, 10, 15, 30, 60, 120, 300) if duration_s / b <= 75), 600)
