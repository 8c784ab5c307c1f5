"""The report's figures, each a function of the results that gives SVG or None (no data)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from numpy.typing import NDArray

from prism.replay.results import (
    METRICS,
    Attainment,
    RequestRecord,
    Results,
    Sample,
    scale_key,
)
from prism.replay.theme import MARKERS, RC, SERIES_MAX, new_axes, series_color, to_svg

Floats = NDArray[np.float64]
Plot = Callable[[Results], Any]

LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "all": "All"}
OTHERS = "other models"
HALF = (6.2, 3.3)
MIB = 1 << 20
MAP_BIN_S = 10.0


def all_plots(results: Results) -> dict[str, str]:
    """Name -> SVG of every figure that has data, in the report's order."""
    plots: dict[str, Plot] = {
        "attainment": attainment_per_model,
        "scales": attainment_per_scale,
        "ttft": lambda found: latency_cdf(found, "ttft", "Time to first token (dotted: SLO)"),
        "tpot": lambda found: latency_cdf(found, "tpot", "Time per output token (dotted: SLO)"),
        "arrivals": arrivals,
        "memory": memory,
        "maps": map_rate,
    }
    with mpl.rc_context(RC):
        drawn = {name: plot(results) for name, plot in plots.items()}
        figures = {name: figure for name, figure in drawn.items() if figure}
        if len(figures) % 2:
            # the page gives an odd last figure the whole width
            list(figures.values())[-1].set_size_inches(2 * HALF[0], HALF[1])
        return {name: to_svg(figure, name) for name, figure in figures.items()}


def attainment_per_model(results: Results) -> Any:
    """Bars per model and in total at the SLO scale nearest to 1."""
    scale = min(results.config.slo_scales, key=lambda value: abs(value - 1))
    groups = {"total": results.summary.total, **results.summary.models}
    found = {name: group.attainment[scale_key(scale)] for name, group in groups.items()}
    if all(attainment.all is None for attainment in found.values()):
        return None
    size = (HALF[0], max(HALF[1], 0.8 + 0.62 * len(found)))
    title = f"SLO attainment per model, SLO scale {scale:g}"
    figure, axes = new_axes(title, "requests within their SLO (%)", "", size)
    rows: Floats = np.arange(len(found), dtype=np.float64)[::-1]
    for number, metric in enumerate(LABELS):
        offsets = rows + 0.3 - 0.2 * number
        _draw_bars(axes, offsets, [_percent(a, metric) for a in found.values()], metric)
    axes.set_yticks(rows, list(found))
    axes.set_xlim(0, 106)
    axes.set_xticks(range(0, 101, 20))
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def attainment_per_scale(results: Results) -> Any:
    """Lines of total attainment over the SLO scales; None with a single scale."""
    scales = sorted(results.config.slo_scales)
    found = [results.summary.total.attainment[scale_key(scale)] for scale in scales]
    if len(scales) < 2 or all(attainment.all is None for attainment in found):
        return None
    xlabel, ylabel = "SLO scale (x the trace's SLOs)", "requests within their SLO (%)"
    figure, axes = new_axes("SLO attainment over SLO scale", xlabel, ylabel, HALF)
    for metric, label in LABELS.items():
        values = [_percent(attainment, metric) for attainment in found]
        style = {"linewidth": 2.4} if metric == "all" else {}
        axes.plot(scales, values, marker="o", color=MARKERS[metric], label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axes.minorticks_off()
    axes.set_ylim(0, 103)
    axes.legend(loc="lower right")
    return figure


def latency_cdf(results: Results, metric: str, title: str) -> Any:
    """One step curve per model over a logarithmic axis of milliseconds, its SLO dotted."""
    groups = _by_group(results)
    series = {name: _latencies_ms(records, metric) for name, records in groups.items()}
    series = {name: values for name, values in series.items() if len(values)}
    if not series:
        return None
    figure, axes = new_axes(title, f"{LABELS[metric]} (ms, log)", "requests at or below (%)", HALF)
    for name, values in series.items():
        points = np.concatenate([values[:1], values])
        percent = np.linspace(0, 100, len(points))
        axes.step(points, percent, where="post", color=_color(results, name), label=name)
    slos_ms = {name: slo for name in series if (slo := _common_slo_ms(groups[name], metric))}
    for name, slo_ms in slos_ms.items():
        axes.axvline(slo_ms, color=_color(results, name), linestyle=":", linewidth=1.2)
    shown = [*np.concatenate(list(series.values())), *slos_ms.values()]
    axes.set_xlim(min(shown) / 1.3, max(shown) * 1.3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda ms, _: f"{ms:g}"))
    axes.set_ylim(0, 101)
    _legend_below(figure, len(series))
    return figure


def _latencies_ms(records: Sequence[RequestRecord], metric: str) -> Floats:
    """Sorted, of finished requests; at least 10 us, since a log axis has no zero."""
    found = [record.value_ms(metric) for record in records if record.ok]
    values: Floats = np.sort([value for value in found if value is not None])
    return np.maximum(values, 0.01)


def _common_slo_ms(records: Sequence[RequestRecord], metric: str) -> float | None:
    """The SLO that all of `records` share; None where they differ."""
    slos_ms = {record.slo_ms(metric) for record in records}
    return slos_ms.pop() if len(slos_ms) == 1 else None


def arrivals(results: Results) -> Any:
    """Stacked bars of requests sent per time bin."""
    groups = _by_group(results)
    if not groups:
        return None
    bin_s = _bin_s(results.summary.duration_s)
    edges_s = np.arange(0, results.summary.duration_s + bin_s, bin_s)
    title, ylabel = "Arrivals per model", f"requests per {bin_s:g} s"
    figure, axes = new_axes(title, "time since start (s)", ylabel, HALF)
    below = np.zeros(len(edges_s) - 1)
    for name, records in groups.items():
        counts = np.histogram([r.arrival_s for r in records], bins=edges_s)[0].astype(float)
        axes.bar(
            edges_s[:-1],
            counts,
            bottom=below,
            width=bin_s * 0.9,
            align="edge",
            color=_color(results, name),
            label=name,
        )
        below += counts
    axes.grid(visible=False, axis="x")
    _legend_below(figure, len(groups))
    return figure


def memory(results: Results) -> Any:
    """Stacked areas of mapped KV memory per model, from the server's status each second."""
    samples = results.samples
    if len(samples) < 2:
        return None
    names = [name for name in _model_order(results) if any(s.kv_bytes.get(name) for s in samples)]
    title, ylabel = "KV cache memory per model", "mapped KV memory (MiB)"
    figure, axes = new_axes(title, "time since start (s)", ylabel, HALF)
    shown = [_series_name(results, name) for name in names]
    totals = {
        name: sum(
            (_kv_mib(samples, n) for n, s in zip(names, shown, strict=True) if s == name),
            np.zeros(len(samples)),
        )
        for name in dict.fromkeys(shown)
    }
    if totals:
        colors = [_color(results, name) for name in totals]
        times_s = [sample.t_s for sample in samples]
        labels = list(totals)
        axes.stackplot(times_s, list(totals.values()), labels=labels, colors=colors, alpha=0.85)
        _legend_below(figure, len(totals))
    axes.set_ylim(bottom=0)
    return figure


def map_rate(results: Results) -> Any:
    """Pages mapped and unmapped per minute, over bins of 10 s."""
    if len(results.samples) < 2:
        return None
    edges_s = np.arange(0, results.samples[-1].t_s + MAP_BIN_S, MAP_BIN_S)
    times_s = [sample.t_s for sample in results.samples]
    title = "Page maps and unmaps"
    figure, axes = new_axes(title, "time since start (s)", "operations per minute", HALF)
    for name, color in (("maps", series_color(0)), ("unmaps", series_color(1))):
        totals = [getattr(sample.counters, name) for sample in results.samples]
        rates = np.diff(np.interp(edges_s, times_s, totals)) * 60 / MAP_BIN_S
        axes.stairs(rates, edges_s, color=color, label=name, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    return figure


def _draw_bars(axes: Any, offsets: Floats, values: Sequence[float], metric: str) -> None:
    axes.barh(offsets, values, height=0.18, color=MARKERS[metric], label=LABELS[metric])
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
    value = getattr(attainment, metric if metric in METRICS else "all")
    return float("nan") if value is None else float(value) * 100


def _model_order(results: Results) -> list[str]:
    """Models of the trace by requests, then those that only the server knows."""
    extra = {name for sample in results.samples for name in sample.kv_bytes}
    return [*results.summary.models, *sorted(extra - set(results.summary.models))]


def _series_name(results: Results, model: str) -> str:
    """The model, or OTHERS where there are more models than colours."""
    order = _model_order(results)
    if len(order) <= SERIES_MAX:
        return model
    return model if model in order[: SERIES_MAX - 1] else OTHERS


def _color(results: Results, series: str) -> str:
    if series == OTHERS:
        return series_color(SERIES_MAX - 1)
    return series_color(_model_order(results).index(series))


def _by_group(results: Results) -> dict[str, list[RequestRecord]]:
    groups: dict[str, list[RequestRecord]] = {}
    for name in results.summary.models:
        chosen = [record for record in results.records if record.model == name]
        groups.setdefault(_series_name(results, name), []).extend(chosen)
    return groups


def _bin_s(duration_s: float) -> float:
    """A round bin of which 30 to 75 fill the run, 1 s at least."""
    return next((b for b in (1, 2, 5, 10, 15, 30, 60, 120, 300) if duration_s / b <= 75), 600)


def _kv_mib(samples: Sequence[Sample], model: str) -> Floats:
    return np.array([sample.kv_bytes.get(model, 0) / MIB for sample in samples])


def _legend_below(figure: Any, entries: int) -> None:
    figure.legend(loc="outside lower center", ncols=min(entries, 4))
