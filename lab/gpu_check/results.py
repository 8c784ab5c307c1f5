"""Results of a run in Markdown, for docs/gpu-results.md: a row, and a table of figures."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lab.gpu_check.expected import MET, MISSED
from lab.gpu_check.report import FAILED, PASSED, SKIPPED

FILE = "gpu-check.md"
UNKNOWN = "?"
Result = dict[str, Any]
HEAD = "| step | figure | value | reference | ratio | expected | verdict |\n" + 7 * "|---" + "|"


def markdown(results: list[Result]) -> str:
    """Returns the row of the run, and below it the table of its figures."""
    row = row_of(results, datetime.now(UTC).date().isoformat())
    return "\n".join([row, "", HEAD, *figure_rows(results)]) + "\n"


def row_of(results: list[Result], date: str) -> str:
    """Returns date, GPU, driver, torch, sources, steps by status and figures by verdict."""
    facts: dict[str, Any] = next(
        (result["facts"] for result in results if result["name"] == "facts"), {}
    )
    cells = [
        date,
        at(facts, "gpu", "name"),
        at(facts, "nvml", "driver"),
        at(facts, "torch", "version"),
        facts.get("commit") or facts.get("sources") or UNKNOWN,
        counts(results),
        verdicts(results),
    ]
    return _row(cells)


def at(facts: Result, *names: str) -> Any:
    """Returns a fact, or "?" where the step did not record it."""
    value: Any = facts
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return UNKNOWN if value is None else value


def counts(results: list[Result]) -> str:
    """Returns the number of steps by status. Steps that did not pass are named."""
    parts = []
    for status in (PASSED, FAILED, SKIPPED):
        names = [result["name"] for result in results if result["status"] == status]
        shown = f" ({', '.join(names)})" if names and status != PASSED else ""
        parts.append(f"{len(names)} {status}{shown}")
    return ", ".join(parts)


def verdicts(results: list[Result]) -> str:
    found = [figure["verdict"] for _, _, figure in _figures(results)]
    return f"{found.count(MET)} met, {found.count(MISSED)} missed of {len(found)}"


def figure_rows(results: list[Result]) -> list[str]:
    return [
        _row(
            [
                step,
                f"`{name}`",
                f"{figure['value']:g} {figure['unit']}".rstrip(),
                "" if figure["reference"] is None else f"{figure['reference']:g}",
                "" if figure["ratio"] is None else f"{figure['ratio']:g}",
                figure["expected"],
                figure["verdict"],
            ]
        )
        for step, name, figure in _figures(results)
    ]


def _figures(results: list[Result]) -> list[tuple[str, str, Result]]:
    return [
        (result["name"], name, figure)
        for result in results
        for name, figure in result["facts"].get("figures", {}).items()
    ]


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"
