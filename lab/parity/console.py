"""Tables of a comparison, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from lab.parity.parity_results import CLASSES, Compared, Figure, ParityResults
from prism_replay.report.page import percent

AIM = "target: 95 %"
ALL = ("attainment", "all models")

DECIDED = ("placement", "admission order")

Row = tuple[str, ...]
DECISION_HEADS = ("decisions", "compared", "equal", "classes of difference")
CLASS_HEADS = ("class", "differences", "meaning")
TEXT_COLUMNS = ("classes of difference", "differences", "meaning")
FIGURE_HEADS = ("group", "figure", "live", "simulated", "error")


def print_parity(console: Console, results: ParityResults) -> None:
    console.print(_table("Repeated decisions", ("decisions", "repeated", "equal"), checks(results)))
    console.print(_table("Decisions, live and simulated", DECISION_HEADS, decisions(results)))
    if classes := explained(results):
        console.print(_table("Classes of difference", CLASS_HEADS, classes))
    shown = [figure for figure in results.figures if figure.group in ALL]
    console.print(_table("Attainment and latency", FIGURE_HEADS, figures(shown)))
    for name, compared in results.compared.items():
        for note, count in compared.notes.items():
            console.print(f"{name}: {note}: {count}", highlight=False)
    for failed, where in ((results.failed_live, "live"), (results.failed_simulated, "simulated")):
        if failed:
            console.print(f"{failed} of {results.requests} requests failed {where}")


def checks(results: ParityResults) -> Iterator[Row]:
    for check in results.checks:
        share = percent(check.equal / check.decisions)
        yield check.name, str(check.decisions), share


def decisions(results: ParityResults) -> Iterator[Row]:
    for name, compared in results.compared.items():
        yield name, str(compared.total), percent(compared.share), _classes(compared)
    equal, total = together(results)
    yield " and ".join(DECIDED), str(total), percent(equal / total if total else None), AIM


def figures(shown: Sequence[Figure]) -> Iterator[Row]:
    for figure in shown:
        live, simulated = _value(figure, figure.live), _value(figure, figure.simulated)
        yield figure.group, figure.name, live, simulated, _error(figure)


def together(results: ParityResults) -> tuple[int, int]:
    """Returns (equal, compared) of DECIDED; the other rows show the same decisions differently."""
    found = [results.compared[name] for name in DECIDED if name in results.compared]
    return sum(each.equal for each in found), sum(each.total for each in found)


def explained(results: ParityResults) -> list[Row]:
    """Returns (class, number of differences by kind of decision, meaning)."""
    found: dict[str, list[str]] = {}
    for name, compared in results.compared.items():
        for kind, count in compared.classes.items():
            found.setdefault(kind, []).append(f"{name} {count}")
    return [(kind, ", ".join(counts), CLASSES.get(kind, "")) for kind, counts in found.items()]


def _classes(compared: Compared) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in compared.classes.items()) or "none"


def _value(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "part":
        return percent(value)
    return f"{value:.4g} {figure.unit}"


def _error(figure: Figure) -> str:
    if figure.error is None:
        return "-"
    unit = "points" if figure.unit == "part" else "%"
    return f"{figure.error * 100:+.1f} {unit}"


def _table(title: str, heads: Sequence[str], rows: Iterable[Row]) -> Table:
    table = Table(title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 or head in TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*row)
    return table
