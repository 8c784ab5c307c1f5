"""Findings of a study over several seeds: figures become means with confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lab.papers.study.findings import UNKNOWN, Findings, Plot, Statement, listed
from prism_replay.intervals import interval

SPACING = 10
"""Difference of two seeds of a study, which may use several traces with consecutive seeds."""


def spaced(first: int, count: int) -> list[int]:
    return [first + number * SPACING for number in range(count)]


def merged(found: Mapping[int, Findings]) -> Findings:
    """Returns the findings over all seeds.

    Args:
        found: Seed -> findings of a run with it.
    """
    runs = list(found.values())
    return Findings(
        [over_seeds(each, len(runs)) for each in _aligned([run.comparisons for run in runs])],
        [_row(rows) for rows in zip(*(run.rows for run in runs), strict=True)],
        {name: _plot([run.plots[name] for run in runs]) for name in runs[0].plots},
        _texts({seed: run.budget for seed, run in found.items()}),
        _texts({seed: run.remarks for seed, run in found.items()}),
    )


def _aligned(runs: Sequence[Sequence[Statement]]) -> list[list[Statement]]:
    """Returns the statements by what they compare, each with those of the runs that have it.

    A run has ablations only of what does not hold in it.
    """
    keys: list[tuple[str, str, str]] = []
    groups: dict[tuple[str, str, str], list[Statement]] = {}
    for run in runs:
        place = 0
        for one in run:
            key = (one.what, one.published, one.source)
            if key not in groups:
                keys.insert(place, key)
            groups.setdefault(key, []).append(one)
            place = keys.index(key) + 1
    return [groups[key] for key in keys]


def over_seeds(found: Sequence[Statement], runs: int) -> Statement:
    """Returns one statement of the same one with several seeds.

    Args:
        runs: Number of all runs, of which some may lack the statement.
    """
    made = _judged(found) if all(one.judge for one in found) else _counted(found)
    ours = _noted(made.ours, len(found), runs)
    return msgspec.structs.replace(made, ours=ours, figures={}, judge=None)


def _noted(text: str, seeds: int, whole: int) -> str:
    return text if seeds == whole else f"{text} ({seeds} of {whole} seeds)"


def _samples(found: Sequence[Statement]) -> dict[str, list[float]]:
    """Returns the figures that at least one seed has."""
    names = dict.fromkeys(name for one in found for name in one.figures)
    known = {name: [one.figures.get(name) for one in found] for name in names}
    return {n: v for n, values in known.items() if (v := [x for x in values if x is not None])}


def _judged(found: Sequence[Statement]) -> Statement:
    """Returns the statement for the figures of the seeds that have all of them.

    The others may differ from them, so without them the verdict is unknown.
    """
    names, judge = _samples(found), found[0].judge
    whole = [one for one in found if all(one.figures.get(name) is not None for name in names)]
    assert judge is not None, "of over_seeds"
    made = judge(_samples(whole))
    if len(whole) == len(found):
        return made
    ours = _noted(made.ours, len(whole), len(found))
    return msgspec.structs.replace(made, ours=ours, verdict=UNKNOWN, agrees=None)


def _counted(found: Sequence[Statement]) -> Statement:
    """Returns the statement with the verdicts and their numbers of seeds."""
    samples = {_noted(name, len(v), len(found)): v for name, v in _samples(found).items()}
    agreed = {one.agrees for one in found}
    return msgspec.structs.replace(
        found[0],
        ours=listed(samples) if samples else _numbered([one.ours for one in found]),
        verdict=_numbered([one.verdict for one in found]),
        agrees=agreed.pop() if len(agreed) == 1 else None,
    )


def _numbered(texts: Sequence[str]) -> str:
    return "; ".join(_noted(text, n, len(texts)) for text, n in Counter(texts).items())


def _row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the row of the same point: what all have in common, means and half-widths."""
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [value for row in rows if (value := row.get(key)) is not None]
        if all(value == values[0] for value in values):
            made[key] = values[0] if values else None
        elif any(isinstance(value, str) for value in values):
            made[key] = "; ".join(dict.fromkeys(str(value) for value in values if value != ""))
        else:
            made[key], made[f"{key}_ci95"] = interval(values)
    return made


def _plot(plots: Sequence[Plot]) -> Plot:
    """Returns the plot of means, or that of the first seed if the seeds' x differ."""
    first = plots[0]
    if len(plots) < 2 or any(_xs(plot) != _xs(first) for plot in plots):
        return first
    lines: dict[str, list[tuple[Any, float | None]]] = {}
    halves: dict[str, list[float | None]] = {}
    for name, line in first.lines.items():
        columns = zip(*([y for _, y in plot.lines[name]] for plot in plots), strict=True)
        each = [interval(ys) if None not in ys else (None, None) for ys in columns]
        lines[name] = [(x, mean) for (x, _), (mean, _) in zip(line, each, strict=True)]
        halves[name] = [half for _, half in each]
    return msgspec.structs.replace(first, lines=lines, halves=halves)


def _xs(plot: Plot) -> dict[str, list[Any]]:
    return {name: [x for x, _ in line] for name, line in plot.lines.items()}


def _texts(found: Mapping[int, Sequence[str]]) -> list[str]:
    """Returns the texts that all seeds have, and the others with their seed."""
    common = [t for t in next(iter(found.values())) if all(t in texts for texts in found.values())]
    own = [f"Seed {s}: {t}" for s, texts in found.items() for t in texts if t not in common]
    return list(dict.fromkeys([*common, *own]))
