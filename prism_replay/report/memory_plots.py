"""Memory over time: of each device with what came and left, or of each model in total."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from prism_replay.lengths import Floats
from prism_replay.report import theme
from prism_replay.report.series import color, series_of
from prism_replay.results import ReplayResults

MIB = 1 << 20
DEVICES_SHOWN = 8
MARKS = {"activate": "^", "evict": "v", "migrate": "D"}
SIMILAR = {"drop_copy": "evict"}
"""Changes that have another one's mark."""


def of_devices(results: ReplayResults) -> Any:
    """Draws the memory of each device over time, as stacked areas of each model's weights (dark)
    and KV (light), with marks where models came and left."""
    names = list(results.samples[-1].devices) if results.samples else []
    if len(results.samples) < 2 or not names:
        return None
    shown = names[:DEVICES_SHOWN]
    size = (2 * theme.HALF[0], 0.9 + 1.5 * len(shown))
    figure, every = theme.new_rows(len(shown), "time since start (s)", size)
    for device, axes in zip(shown, every, strict=True):
        _draw_device(axes, results, device)
    every[0].set_title("Memory of each device: weights (dark) and KV (light)", pad=18)
    used = dict.fromkeys(series_of(results).values())
    patches = [Patch(color=color(results, name), label=name) for name in used]
    style: dict[str, Any] = {"color": theme.MARKERS["fg"], "linestyle": "", "markersize": 5}
    marks = [Line2D([], [], marker=mark, label=kind, **style) for kind, mark in MARKS.items()]
    figure.legend(handles=[*patches, *marks], loc="outside lower center", ncols=6)
    return figure


def _draw_device(axes: Any, results: ReplayResults, device: str) -> None:
    samples = [sample for sample in results.samples if device in sample.devices]
    found = [sample.devices[device] for sample in samples]
    scale, unit = theme.size_unit(max(memory.capacity_bytes for memory in found))
    layers: dict[tuple[str, bool], Floats] = {}
    for model, series in series_of(results).items():
        for is_kv in (False, True):
            sizes = [m.kv_bytes if is_kv else m.weights_bytes for m in found]
            heights = np.array([size.get(model, 0) / scale for size in sizes])
            if heights.any():
                key = (series, is_kv)
                layers[key] = layers.get(key, 0) + heights
    times_s = [sample.t_s for sample in samples]
    below = np.zeros(len(times_s))
    for (series, is_kv), heights in layers.items():
        style: dict[str, Any] = {"color": color(results, series), "alpha": 0.45 if is_kv else 0.95}
        above = below + heights
        axes.fill_between(times_s, below, above, linewidth=0, step="post", **style)
        below = above
    capacity = found[-1].capacity_bytes / scale
    axes.axhline(capacity, color=theme.MARKERS["muted"], linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.05 * capacity)
    axes.set_ylabel(f"{device} ({unit})")
    _mark_changes(axes, results, device)


def _mark_changes(axes: Any, results: ReplayResults, device: str) -> None:
    """Draws a mark above the axes for each change on the device, in the model's colour."""
    series = series_of(results)
    above = axes.get_xaxis_transform()
    for change in results.changes:
        if device in (change.device, change.target) and change.model in series:
            axes.plot(
                [change.t_s],
                [1.06],
                marker=MARKS[SIMILAR.get(change.kind, change.kind)],
                color=color(results, series[change.model]),
                transform=above,
                clip_on=False,
                markersize=5,
            )


def total(results: ReplayResults) -> Any:
    """Draws stacked areas of mapped KV memory per model, from the server's status samples. None if
    the memory of each device is known."""
    samples = results.samples
    if len(samples) < 2 or samples[-1].devices:
        return None
    title, ylabel = "KV cache memory per model", "mapped KV memory (MiB)"
    figure, axes = theme.new_axes(title, "time since start (s)", ylabel, theme.HALF)
    totals: dict[str, Floats] = {}
    for model, name in series_of(results).items():
        mib = np.array([sample.kv_bytes.get(model, 0) / MIB for sample in samples])
        if mib.any():
            totals[name] = totals.get(name, 0) + mib
    if totals:
        colors = [color(results, name) for name in totals]
        times_s = [sample.t_s for sample in samples]
        labels = list(totals)
        axes.stackplot(times_s, list(totals.values()), labels=labels, colors=colors, alpha=0.85)
        theme.legend_below(figure, min(len(totals), 4))
    axes.set_ylim(bottom=0)
    return figure
