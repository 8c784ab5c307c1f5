"""Memory over time: of each device with what came and left, or of each model in total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from prism_replay.lengths import Floats
from prism_replay.report import theme
from prism_replay.report.series import colors_of, series_of
from prism_replay.results import PlacementChange, ReplayResults, StatusSample

MIB = 1 << 20
DEVICES_SHOWN = 8
SAMPLES_SHOWN = 400
MARKS_SHOWN = 300
MARKS = {"activate": "^", "evict": "v", "migrate": "D"}
HEIGHTS = {"^": 1.15, "v": 1.06, "D": 1.06}
"""Heights of marks in parts of the axes, so that those of the same time are apart."""
SIMILAR = {"drop_copy": "evict"}
"""Changes that have another one's mark."""


def of_devices(results: ReplayResults) -> Any:
    """Draws the memory of each device over time, as stacked areas of each model's weights (dark)
    and KV (light), with marks where models came and left."""
    names = list(dict.fromkeys(name for sample in results.samples for name in sample.devices))
    if len(results.samples) < 2 or not names:
        return None
    rows = names[:DEVICES_SHOWN]
    figure, every = theme.new_rows(
        len(rows), "time since start (s)", (2 * theme.HALF[0], 0.9 + 1.5 * len(rows))
    )
    series = series_of(results)
    colors = colors_of(series)
    for device, axes in zip(rows, every, strict=True):
        _draw_device(axes, results, device, series, colors)
    of = (
        f"the first {len(rows)} of {len(names)} devices"
        if len(rows) < len(names)
        else "each device"
    )
    every[0].set_title(f"Memory of {of}: weights (dark) and KV (light)", pad=22)
    patches = [Patch(color=shade, label=name) for name, shade in colors.items()]
    style: dict[str, Any] = {"color": theme.MARKERS["fg"], "linestyle": "", "markersize": 5}
    marks = [Line2D([], [], marker=mark, label=kind, **style) for kind, mark in MARKS.items()]
    theme.legend_below(figure, 6, [*patches, *marks])
    return figure


def _draw_device(
    axes: Any,
    results: ReplayResults,
    device: str,
    series: Mapping[str, str],
    colors: Mapping[str, str],
) -> None:
    samples = _thinned([sample for sample in results.samples if device in sample.devices])
    found = [sample.devices[device] for sample in samples]
    scale, unit = theme.size_unit(max(memory.capacity_bytes for memory in found))
    layers: dict[tuple[str, bool], Floats] = {}
    for model, name in series.items():
        for is_kv in (False, True):
            sizes = [m.kv_bytes if is_kv else m.weights_bytes for m in found]
            heights = np.array([size.get(model, 0) / scale for size in sizes])
            if heights.any():
                layers[name, is_kv] = layers.get((name, is_kv), 0) + heights
    times_s = [sample.t_s for sample in samples]
    below = np.zeros(len(times_s))
    for (name, is_kv), heights in layers.items():
        style: dict[str, Any] = {"color": colors[name], "alpha": 0.45 if is_kv else 0.95}
        above = below + heights
        axes.fill_between(times_s, below, above, linewidth=0, step="post", **style)
        below = above
    capacity = found[-1].capacity_bytes / scale
    axes.axhline(capacity, color=theme.MARKERS["muted"], linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.05 * capacity)
    axes.set_ylabel(f"{device} ({unit})")
    own = [c for c in results.changes if device in (c.device, c.target) and c.model in series]
    _mark(axes, own, series, colors)


def _thinned(samples: Sequence[StatusSample]) -> Sequence[StatusSample]:
    """Returns SAMPLES_SHOWN samples and the last one at most: more are not visible."""
    step = -(-len(samples) // SAMPLES_SHOWN)
    return [*samples[:-1:step], samples[-1]]


def _mark(
    axes: Any,
    changes: Sequence[PlacementChange],
    series: Mapping[str, str],
    colors: Mapping[str, str],
) -> None:
    """Draws a mark above the axes for each change, in the model's colour. None if they would hide
    each other."""
    times_s: dict[tuple[str, str], list[float]] = {}
    for change in changes if len(changes) <= MARKS_SHOWN else ():
        mark = MARKS[SIMILAR.get(change.kind, change.kind)]
        times_s.setdefault((mark, colors[series[change.model]]), []).append(change.t_s)
    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    for (mark, shade), at_s in times_s.items():
        style: dict[str, Any] = {"color": shade, "linestyle": "", "markersize": 5}
        axes.plot(at_s, [HEIGHTS[mark]] * len(at_s), marker=mark, **style, **above)


def total(results: ReplayResults) -> Any:
    """Draws stacked areas of mapped KV memory per model, from the server's status samples. None if
    all of it is in the plot of devices."""
    samples = results.samples
    if len(samples) < 2 or 0 < len(samples[-1].devices) <= DEVICES_SHOWN:
        return None
    title, ylabel = "KV cache memory per model", "mapped KV memory (MiB)"
    figure, axes = theme.new_axes(title, "time since start (s)", ylabel, theme.HALF)
    totals: dict[str, Floats] = {}
    series = series_of(results)
    for model, name in series.items():
        mib = np.array([sample.kv_bytes.get(model, 0) / MIB for sample in samples])
        if mib.any():
            totals[name] = totals.get(name, 0) + mib
    if totals:
        colors = colors_of(series)
        shades = [colors[name] for name in totals]
        times_s = [sample.t_s for sample in samples]
        labels = list(totals)
        axes.stackplot(times_s, list(totals.values()), labels=labels, colors=shades, alpha=0.85)
        theme.legend_below(figure, min(len(totals), 4))
    axes.set_ylim(bottom=0)
    return figure
