"""Lines of a figure (a measure of each system at each x), and functions that evaluate them.

`smaller` is True if smaller figures are better. Systems are compared at the same x, and are equal
if they differ by at most `findings.EQUAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from lab.papers.study import findings
from lab.papers.study.findings import Findings, Plot, Statement
from lab.papers.study.trial import TrialOutcome

Line = Sequence[tuple[Any, float | None]]
Lines = dict[str, list[tuple[Any, float | None]]]
Points = Mapping[Any, Mapping[str, TrialOutcome]]
"""x -> system -> outcome."""
Measure = Callable[[TrialOutcome], float | None]

TARGET = 99.0
"""Attainment in percent that a system has to reach."""


def lines(points: Points, measure: Measure) -> Lines:
    """Returns the lines of the systems at the first x; missing points are left out."""
    return {
        name: [(x, measure(found[name])) for x, found in points.items() if name in found]
        for name in next(iter(points.values()))
    }


def outcomes(points: Points) -> list[TrialOutcome]:
    return [found for by_name in points.values() for found in by_name.values()]


def cut(found: Lines, xs: Collection[Any]) -> Lines:
    """Returns the lines at these xs only."""
    return {name: [(x, y) for x, y in line if x in xs] for name, line in found.items()}


def ratio_at(found: Lines, x: Any, name: str, over: str, *, smaller: bool = False) -> float | None:
    """Returns the factor by which `name` is better than `over` at x; below 1 if it is worse."""
    a, b = (dict(found.get(system, [])).get(x) for system in (name, over))
    return findings.ratio(b, a) if smaller else findings.ratio(a, b)


def ratios(found: Lines, name: str, over: str, *, smaller: bool = False) -> list[tuple[Any, float]]:
    """Returns (x, `ratio_at`) for each x at which both figures exist."""
    each = ((x, ratio_at(found, x, name, over, smaller=smaller)) for x, _ in found[name])
    return [(x, ratio) for x, ratio in each if ratio is not None]


def best_ratio(found: Lines, name: str, over: str, *, smaller: bool = False) -> float | None:
    """Returns the largest of `ratios`, which papers call "up to"."""
    each = ratios(found, name, over, smaller=smaller)
    return max((ratio for _, ratio in each), default=None)


def better_systems(
    found: Lines, name: str, others: Iterable[str], *, smaller: bool = False
) -> list[tuple[Any, str]]:
    """Returns (x, system) for each x at which another system is better than `name`."""
    known = [other for other in others if other in found]
    values = {other: dict(found[other]) for other in known}
    return [
        (x, other)
        for x, own in found[name]
        for other in known
        if own is not None
        and (value := values[other].get(x)) is not None
        and findings.is_worse(own, value, smaller=smaller)
    ]


def mean(line: Line) -> float | None:
    values = [y for _, y in line if y is not None]
    return sum(values) / len(values) if values else None


def up_to(line: Line) -> float | None:
    """Returns the largest x up to which a falling line is at TARGET, interpolated between points.

    The last x if the line never falls below TARGET; None if it starts below.
    """
    held: tuple[float, float] | None = None
    for x, y in line:
        if y is None:
            return None
        if y < TARGET:
            if held is None:
                return None
            x0, y0 = held
            return float(x0 + (x - x0) * (y0 - TARGET) / (y0 - y)) if y0 > y else x0
        held = (float(x), y)
    return held[0] if held else None


def first_at_target(line: Line) -> float | None:
    """Returns the smallest x at which a rising line is at TARGET; None if it never is."""
    return next((float(x) for x, y in line if y is not None and y >= TARGET), None)


def problems(found: Iterable[TrialOutcome]) -> list[str]:
    """Returns the reasons why points were not simulated, each once."""
    lost = [f"{f.changes.get('policy', '')}: {_reason(f)}" for f in found if f.problem]
    return [f"not simulated: {reason}" for reason in dict.fromkeys(lost)]


def _reason(found: TrialOutcome) -> str:
    return found.problem.rpartition(": ")[2]


def study_of(
    points: Points, compared: list[Statement], plots: dict[str, Plot], budget: list[str]
) -> Findings:
    """Returns the findings of a study of these points, with their rows and problems."""
    return Findings(compared, rows(points), plots, budget, problems(outcomes(points)))


def rows(points: Points, **heads: Any) -> list[dict[str, Any]]:
    pairs = ((x, name, found) for x, by_name in points.items() for name, found in by_name.items())
    return [row(found, **heads, x=x, system=name) for x, name, found in pairs]


def row(found: TrialOutcome, **heads: Any) -> dict[str, Any]:
    if found.summary is None:
        return {**heads, "problem": _reason(found)}
    total, counts = found.summary.total, found.counts
    return {
        **heads,
        "requests": total.requests,
        "ttft_attainment": found.percent("ttft"),
        "tpot_attainment": found.percent("tpot"),
        "e2e_attainment": found.percent("e2e"),
        "mean_ttft_ms": total.ttft_ms.mean,
        "p99_ttft_ms": total.ttft_ms.p99,
        "mean_tpot_ms": total.tpot_ms.mean,
        "mean_e2e_ms": total.e2e_ms.mean,
        "p99_e2e_ms": total.e2e_ms.p99,
        "normalized_latency": found.normalized_latency,
        "completed_rps": found.completed_rps,
        "weighted_rps": found.weighted_rps,
        "lost": found.lost,
        "gpu_busy": found.busy,
        "activations": counts.get("active", 0),
        "migrations": counts.get("migrated", 0),
        "retractions": counts.get("retractions", 0),
        "problem": "",
    }
