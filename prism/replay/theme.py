"""matplotlib figures as inline SVG whose colours are CSS variables: one file, dark and light.

Figures are drawn in marker colours that no figure uses otherwise; in the SVG text each marker
is replaced by its variable, which the page's style sheet defines for both schemes.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

SERIES_MAX = 8
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


def series_color(number: int) -> str:
    return MARKERS[f"s{number % SERIES_MAX}"]


def new_axes(title: str, xlabel: str, ylabel: str, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of `size` inches with one axes. REQUIRES: inside `mpl.rc_context(RC)`."""
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def to_svg(figure: Any, name: str) -> str:
    """An <svg> element without anything that a browser would fetch; ids start with `name`."""
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
