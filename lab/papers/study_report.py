"""Output of a study: study.json, comparisons.csv, points.csv and an HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.table import Table

from lab.papers.catalog import Study, StudyTexts
from lab.papers.study.findings import Findings, Plot, Statement, overall
from lab.papers.study.seeds import merged
from lab.papers.study.sources import Sources
from prism_replay.outcomes import write_csv
from prism_replay.report.page import environment
from prism_replay.report.theme import RC, SERIES_MAX, log_y, new_axes, series_color, to_svg
from prism_replay.results import write_json

SCHEMA = "prism-sim-study/2"
SIZE = (6.2, 3.3)


class StudyResult(StudyTexts, frozen=True):
    quick: bool
    """True for the size for tests, whose figures are meaningless."""
    seeds: list[int]
    traces: str
    """Source of the traces."""
    findings: Findings
    schema: str = SCHEMA

    @property
    def verdict(self) -> str:
        return overall(self.findings.comparisons)


def result(
    study: Study,
    found: Mapping[int, Findings],
    *,
    quick: bool,
    sources: Sources,
) -> StudyResult:
    """Returns the result of a study.

    Args:
        found: Seed -> findings.
        sources: Traces of the run, with its reductions in addition to `study.shortened`.
    """
    texts = {name: getattr(study, name) for name in StudyTexts.__struct_fields__}
    texts["shortened"] = "; ".join(text for text in (study.shortened, *sources.shortened) if text)
    return StudyResult(
        **texts, quick=quick, seeds=list(found), traces=sources.described(), findings=merged(found)
    )


def write(folder: Path, found: StudyResult) -> None:
    write_json(folder / "study.json", found)
    heads = ("what", "ours", "published", "verdict", "source", "agrees")
    compared = [{head: getattr(c, head) for head in heads} for c in found.findings.comparisons]
    write_csv(folder / "comparisons.csv", compared)
    write_csv(folder / "points.csv", found.findings.rows)
    (folder / "report.html").write_text(page(found), encoding="utf-8")


def page(found: StudyResult) -> str:
    heads = list(dict.fromkeys(key for row in found.findings.rows for key in row))
    cells = [[_cell(row.get(head)) for head in heads] for row in found.findings.rows]
    template = environment("lab.papers", "prism_replay").get_template("study.html")
    return template.render(
        found=found, about=about(found.seeds), plots=drawn(found.findings), heads=heads, rows=cells
    )


def drawn(found: Findings) -> dict[str, str]:
    with mpl.rc_context(RC):
        return {name: _svg(name, plot) for name, plot in found.plots.items()}


def _svg(name: str, plot: Plot) -> str:
    figure, axes = new_axes(plot.title, plot.xlabel, plot.ylabel, SIZE)
    draw = _bars if plot.bars else _curves
    draw(axes, plot)
    if plot.log:
        log_y(axes)
    if any(label for label in axes.get_legend_handles_labels()):
        figure.legend(loc="outside lower center", ncols=3)
    return to_svg(figure, name)


def _curves(axes: Any, plot: Plot) -> None:
    for number, (label, points) in enumerate(plot.lines.items()):
        halves = plot.halves.get(label, [None] * len(points))
        known = [
            (x, y, h or 0.0) for (x, y), h in zip(points, halves, strict=True) if y is not None
        ]
        if known:
            xs, ys, errors = zip(*known, strict=True)
            color = series_color(min(number, SERIES_MAX - 1))
            marker = "o" if len(known) <= 24 else None
            axes.plot(xs, ys, marker=marker, markersize=4, color=color, label=label)
            if any(errors):
                axes.errorbar(xs, ys, yerr=errors, fmt="none", ecolor=color, capsize=3)


def _bars(axes: Any, plot: Plot) -> None:
    labels = list(dict.fromkeys(str(x) for points in plot.lines.values() for x, _ in points))
    width = 0.8 / max(1, len(plot.lines))
    for number, (label, points) in enumerate(plot.lines.items()):
        places = [labels.index(str(x)) + (number + 0.5) * width - 0.4 for x, _ in points]
        color = series_color(min(number, SERIES_MAX - 1))
        halves = [half or 0.0 for half in plot.halves.get(label, [])] or None
        ys = [y or 0.0 for _, y in points]
        axes.bar(places, ys, width, yerr=halves, color=color, label=label)
    axes.set_xticks(range(len(labels)), labels)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(found: StudyResult) -> Table:
    size = " (quick: meaningless figures)" if found.quick else f", {len(found.seeds)} seeds"
    made = Table(title=f"{found.name}: {found.verdict}{size}", caption=found.source)
    for column in ("statement", "ours", "published", "verdict"):
        made.add_column(column, overflow="fold")
    for c in found.findings.comparisons:
        made.add_row(c.what, c.ours, c.published, c.verdict)
    return made


def markdown(results: Sequence[StudyResult]) -> str:
    """Returns a page of all studies: a table of verdicts, then a section for each."""
    lines = [about(results[0].seeds), "", "| study | verdict | source |", "|---|---|---|"]
    lines += [f"| [{r.name}](#{r.name}) | {r.verdict} | {r.source} |" for r in results]
    return "\n".join(lines) + "\n" + "".join(_section(r) for r in results)


def about(seeds: Sequence[int]) -> str:
    """Returns a sentence on what the figures are."""
    if len(seeds) < 2:
        return f"Figures of single runs, seed {seeds[0]}."
    return (
        f"Figures are means over seeds {', '.join(map(str, seeds))}, ± half the 95 % confidence "
        "interval. An order agrees if the interval of the paired differences excludes zero."
    )


def _section(found: StudyResult) -> str:
    lines = [f"\n## {found.name}", f"{found.title} ({found.source}).", ""]
    lines += ["| statement | ours | published | verdict |", "|---|---|---|---|"]
    lines += [_line(c) for c in found.findings.comparisons]
    texts = {"Setup": found.setup, "Shortened": found.shortened, "Why it may differ": found.differs}
    lines += ["", *(f"{head}: {_sentence(text)}" for head, text in texts.items() if text)]
    lines += [_sentence(text) for text in (*found.findings.budget, *found.findings.remarks)]
    return "\n".join(lines) + "\n"


def _line(c: Statement) -> str:
    cells = (f"{c.what} ({c.source})", c.ours, c.published, c.verdict)
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
