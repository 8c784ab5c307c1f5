"""Figures as inline SVG with CSS variables for colours, for pages with dark and light schemes.

matplotlib draws in marker colours that are not used otherwise. Each marker in the SVG text is
replaced by its variable, which the page's style sheet defines for both schemes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

HALF = (6.2, 3.3)
"""Size in inches of a figure that fills half of the page's width."""
ENTRY_WIDTH, CHARACTER_WIDTH = 0.58, 0.066
"""Inches that an entry of a legend takes, without its text, and a character of its text."""
SERIES_MAX = 8
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
_NAMES = ["fg", "muted", "grid", "ttft", "tpot", "e2e", "all"]
_NAMES += [f"s{number}" for number in range(SERIES_MAX)]
MARKERS = {name: f"#0a0b{number:02x}" for number, name in enumerate(_NAMES, 1)}
RC = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": MARKERS["muted"],
    "axes.labelcolor": MARKERS["fg"],
    "axes.titlecolor": MARKERS["fg"],
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": MARKERS["grid"],
    "grid.linewidth": 0.7,
    "text.color": MARKERS["fg"],
    "xtick.color": MARKERS["muted"],
    "ytick.color": MARKERS["muted"],
    "xtick.labelcolor": MARKERS["fg"],
    "ytick.labelcolor": MARKERS["fg"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}


def draw(plots: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Returns name -> SVG of each plot, without those that have no data.

    If the figures of half the page's width do not fill their last row, the last of them gets the
    full width. A figure of the full width is drawn twice, for wide screens and for narrow ones.

    Args:
        plots: Functions that draw a figure, or return None if they have no data.
    """
    with mpl.rc_context(RC):
        drawn = {name: plot() for name, plot in plots.items()}
        figures = {name: figure for name, figure in drawn.items() if figure}
        halves = [figure for figure in figures.values() if not _is_wide(figure)]
        if len(halves) % 2:
            halves[-1].set_figwidth(2 * HALF[0])
        return {name: _for_screens(figure, name) for name, figure in figures.items()}


def _is_wide(figure: Any) -> bool:
    return bool(figure.get_figwidth() > HALF[0])


def _for_screens(figure: Any, name: str) -> str:
    """Returns the SVG of a figure, or one element with both SVGs of a wide figure."""
    if not _is_wide(figure):
        return to_svg(figure, name)
    wide = to_svg(figure, name)
    figure.set_figwidth(HALF[0])
    narrow = to_svg(figure, f"{name}-narrow")
    found = {"wide": wide, "narrow": narrow}
    svgs = (svg.replace("<svg", f'<svg class="{kind}"', 1) for kind, svg in found.items())
    return f"<div>{''.join(svgs)}</div>"


def series_color(number: int) -> str:
    return MARKERS[f"s{number % SERIES_MAX}"]


def new_axes(title: str, xlabel: str, ylabel: str, size: tuple[float, float]) -> tuple[Any, Any]:
    """Returns a figure of `size` inches with one axes. REQUIRES: inside `mpl.rc_context(RC)`."""
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def new_rows(count: int, xlabel: str, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Returns a figure of `size` inches with `count` axes below each other, which share the x-axis.
    REQUIRES: inside `mpl.rc_context(RC)`."""
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    rows = list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    for axes in rows:
        axes.patch.set_alpha(0)
    rows[-1].set_xlabel(xlabel)
    return figure, rows


def size_unit(size_bytes: float) -> tuple[int, str]:
    """Returns the unit in which a size is 1 or more, and its name."""
    return (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")


def draw_cdf(
    axes: Any, values: Sequence[float] | NDArray[np.float64], color: str, label: str | None
) -> None:
    """Draws the CDF of `values` in per cent as a step curve."""
    ordered = np.sort(np.asarray(values, dtype=float))
    points = np.concatenate([ordered[:1], ordered])
    axes.step(points, np.linspace(0, 100, len(points)), where="post", color=color, label=label)


def log_x(axes: Any) -> None:
    axes.set_xscale("log")
    _log_ticks(axes.xaxis)


def log_y(axes: Any) -> None:
    axes.set_yscale("log")
    _log_ticks(axes.yaxis)


def _log_ticks(axis: Any) -> None:
    """Labels 1, 2, 5, 10 and so on. Without it, an axis within one decade has minor labels in
    TeX."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(_PLAIN)
    axis.set_minor_locator(NullLocator())


def legend_below(figure: Any, columns: int, handles: Sequence[Any] | None = None) -> None:
    """Draws the legend in rows of equal length, as wide as a half of the page at most.

    Args:
        columns: Most entries of a row.
        handles: Entries. Default: those of the figure's axes.
    """
    if handles is None:
        handles = [one for axes in figure.axes for one in axes.get_legend_handles_labels()[0]]
    if not handles:
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    fitting = int(HALF[0] / (ENTRY_WIDTH + CHARACTER_WIDTH * longest))
    rows = -(-len(handles) // max(1, min(columns, fitting)))
    columns = -(-len(handles) // rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def to_svg(figure: Any, name: str) -> str:
    """Returns a self-contained <svg> element whose ids start with `name`."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for marker_name, marker in MARKERS.items():
        svg = svg.replace(marker, f"var(--{marker_name})")
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1)
