"""Results of a study: comparisons of our figures with the published ones, with verdicts.

A figure is a sample with one value for each seed; a single run has one value. Figures are shown as
the mean over seeds ± half the 95 % confidence interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec

from prism_replay.intervals import interval

EQUAL = 0.02
"""Largest relative difference of figures that count as equal."""
UNKNOWN = "cannot be said here"
Figures = Mapping[str, float | None]
"""Name or unit -> figure of one run."""
Samples = Mapping[str, Sequence[float]]
"""Name or unit -> figures over seeds, in the same order for all."""


class Statement(msgspec.Struct, frozen=True):
    """Comparison of a paper's statement with our figure."""

    what: str
    ours: str
    published: str
    verdict: str
    source: str
    """Figure, table or section of the paper."""
    agrees: bool | None = None
    """None if the paper lacks the figure, or if ours do not decide."""
    figures: dict[str, float | None] = {}
    """Figures of this run in `ours`; empty in the results."""
    judge: Callable[[Samples], Statement] | None = None
    """Function that returns the statement for the figures of several runs. None if the verdict is
    that on which the runs agree."""


def judged(judge: Callable[[Samples], Statement], figures: Figures) -> Statement:
    found = judge({name: [value] for name, value in figures.items() if value is not None})
    return msgspec.structs.replace(found, figures=dict(figures), judge=judge)


def shown(values: Sequence[float], form: str = ".4g") -> str:
    """Returns the mean, with half the confidence interval for several values."""
    mean, half = interval(values)
    if len(values) < 2:
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {half:{'.0f' if half >= 100 else '.2g'}}"


def times(values: Sequence[float]) -> str:
    return f"{shown(values, '.2f')}x"


def listed(samples: Samples) -> str:
    """Returns a text such as "99 ± 0.5 % with 2, 2 ± 0.1x" for the names "% with 2" and "x"."""
    parts = (
        f"{shown(values)}{'' if name.startswith('x') else ' '}{name}".strip()
        for name, values in samples.items()
    )
    return ", ".join(parts) or "-"


class Plot(msgspec.Struct, frozen=True):
    title: str
    xlabel: str
    ylabel: str
    lines: dict[str, list[tuple[Any, float | None]]]
    """Name -> (x, y)."""
    bars: bool = False
    """True for bars, with labels as x."""
    log: bool = False
    """True for a logarithmic y axis."""
    halves: dict[str, list[float | None]] = {}
    """Name -> half the confidence interval of each y; empty for a single run."""


class Findings(msgspec.Struct, frozen=True):
    comparisons: list[Statement]
    rows: list[dict[str, Any]]
    """One row per point, for the CSV."""
    plots: dict[str, Plot]
    budget: list[str] = []
    """Texts on the settings each policy was tuned with and the information it is given."""
    remarks: list[str] = []
    """Notes on this run, such as policies that were not simulated."""


def overall(comparisons: Sequence[Statement]) -> str:
    """Returns a phrase on how many of the paper's statements agree."""
    judged = [c.agrees for c in comparisons if c.agrees is not None]
    if not judged:
        return "nothing to compare"
    held = sum(judged)
    if held == len(judged):
        return f"agrees ({held} of {len(judged)})"
    return f"{'partly' if held else 'differs'} ({held} of {len(judged)} agree)"


def factor(what: str, ours: float | None, published: float | None, source: str) -> Statement:
    """Compares a ratio of the paper's system over a baseline; above 1, the system is better.

    Nothing is said if the confidence interval includes 1 and more than EQUAL on either side.

    Args:
        published: None if the paper only says that its system is better.
    """

    def judge(samples: Samples) -> Statement:
        said = "better" if published is None else f"{published:.2f}x"
        if not samples:
            return Statement(what, "-", said, "cannot be formed here", source)
        mean, half = interval(samples["x"])
        agrees: bool | None = mean > 1 + EQUAL
        verdict = "the other way round"
        if half > EQUAL and half >= abs(mean - 1):
            verdict, agrees = UNKNOWN, None
        elif abs(mean - 1) <= EQUAL:
            verdict = "no difference here"
        elif agrees:
            part = f", {mean / published:.2f} of the published factor" if published else ""
            verdict = f"same direction{part}"
        return Statement(what, times(samples["x"]), said, verdict, source, agrees)

    return judged(judge, {"x": ours})


def value(
    what: str,
    ours: float | None,
    published: float,
    source: str,
    *,
    unit: str = "",
    within: float = 0.25,
    missing: tuple[str, str, bool | None] = ("-", "cannot be formed here", None),
) -> Statement:
    """Compares a figure, which agrees if it is within a fraction of the published one.

    Args:
        missing: `ours`, `verdict` and `agrees` without our figure.
    """

    def judge(samples: Samples) -> Statement:
        said = f"{published:.4g} {unit}".strip()
        if not samples:
            text, verdict, agrees = missing
            return Statement(what, text, said, verdict, source, agrees)
        mean = fmean(samples[unit])
        far, near = abs(mean - published), within * abs(published)
        verdict = "same" if far <= EQUAL * abs(published) else "near"
        if far > near:
            verdict = f"{mean / published:.2f} of the published" if published else "differs"
        return Statement(what, listed(samples), said, verdict, source, far <= near)

    return judged(judge, {unit: ours})


def reached(
    what: str,
    ours: float | None,
    published: float,
    source: str,
    *,
    unit: str,
    most: float,
    within: float = 0.25,
) -> Statement:
    """Compares the first x at which a target is reached.

    Args:
        ours: None if the target is not reached.
        most: Largest x that was tried.
    """
    missing = (f"not up to {most:.4g}", "not reached here", False)
    return value(what, ours, published, source, unit=unit, within=within, missing=missing)


def claim(
    what: str, holds: bool | None, ours: str | Figures, published: str, source: str
) -> Statement:
    """Returns a statement that holds over several seeds if it holds with each of them."""
    verdict = {True: "holds", False: "does not hold here", None: UNKNOWN}[holds]
    if isinstance(ours, str):
        return Statement(what, ours, published, verdict, source, holds)
    return noted(Statement(what, "", published, verdict, source, holds), ours)


def noted(found: Statement, figures: Figures) -> Statement:
    """Returns the statement with these figures as `ours`."""
    known = {name: [value] for name, value in figures.items() if value is not None}
    return msgspec.structs.replace(found, ours=listed(known), figures=dict(figures))


def unpublished(what: str, ours: float | None, source: str) -> Statement:
    """Returns a statement of our factor, which the paper's text lacks."""

    def judge(samples: Samples) -> Statement:
        text = times(samples["x"]) if samples else "-"
        return Statement(what, text, "not published", "not counted", source)

    return judged(judge, {"x": ours})


def order(
    what: str,
    ours: Figures,
    published: Sequence[str | tuple[str, ...]],
    source: str,
    *,
    smaller: bool = False,
) -> Statement:
    """Compares an order of systems.

    A pair differs if our figures have the reverse order, and is tied if they are `tied`. With a
    tie, the statement neither agrees nor disagrees.

    Args:
        published: Names, best first. The paper does not order the names within a tuple. Names that
            are not in `ours` are left out.
        smaller: True if smaller figures are better.
    """
    levels = [(names,) if isinstance(names, str) else names for names in published]
    places = {name: place for place, names in enumerate(levels) for name in names}

    def judge(samples: Samples) -> Statement:
        names = [name for name in places if name in samples]
        pairs = [(a, b) for a in names for b in names if places[a] < places[b]]
        wrong = [(a, b) for a, b in pairs if _below(samples[a], samples[b], smaller)]
        equal = [(a, b) for a, b in pairs if tied(samples[a], samples[b])]
        text = _ranked({name: samples[name] for name in names}, smaller)
        said = " > ".join(", ".join(names) for names in levels)
        if not pairs:
            return Statement(what, text or "-", said, UNKNOWN, source)
        agrees = False if wrong else None if equal else True
        verdict = _ordered(wrong, equal, samples, len(pairs))
        return Statement(what, text, said, verdict, source, agrees)

    return judged(judge, {name: value for name, value in ours.items() if name in places})


def _ordered(
    wrong: Sequence[tuple[str, str]],
    equal: Sequence[tuple[str, str]],
    samples: Samples,
    pairs: int,
) -> str:
    if len(equal) == pairs:
        return _no_order(equal, samples)
    verdict = "same order"
    if wrong:
        text = ", ".join(f"{b} before {a}" for a, b in wrong)
        verdict = f"differs in {len(wrong)} of {pairs} pairs: {text}"
    text = ", ".join(f"{a} and {b}" for a, b in equal)
    return f"{verdict}, but {text} {_equality(equal, samples)}" if equal else verdict


def _equality(pairs: Sequence[tuple[str, str]], samples: Samples) -> str:
    alike = all(same(fmean(samples[a]), fmean(samples[b])) for a, b in pairs)
    return "are equal here" if alike else "cannot be told apart"


def _no_order(pairs: Sequence[tuple[str, str]], samples: Samples) -> str:
    return "no difference here" if "equal" in _equality(pairs, samples) else UNKNOWN


def _ranked(samples: Samples, smaller: bool) -> str:
    """Returns the names and figures, best first, with "=" between tied neighbours."""
    names = sorted(samples, key=lambda name: fmean(samples[name]) * (1 if smaller else -1))
    parts = [f"{name} {shown(samples[name])}" for name in names]
    for i, (a, b) in enumerate(pairwise(names), 1):
        parts[i] = f"{'=' if tied(samples[a], samples[b]) else '>'} {parts[i]}"
    return " ".join(parts)


def best(
    what: str,
    name: str,
    ours: Figures,
    published: str,
    source: str,
    *,
    unit: str,
    smaller: bool = False,
) -> Statement:
    """Compares the name with the largest figure, or with the smallest one.

    With a tie, the statement neither agrees nor disagrees.
    """

    def judge(samples: Samples) -> Statement:
        pairs = [(other, name) for other in samples if other != name and name in samples]
        above = [a for a, _ in pairs if _below(samples[name], samples[a], smaller)]
        equal = [pair for pair in pairs if tied(*(samples[each] for each in pair))]
        agrees = False if above else None if equal or not pairs else True
        verdict = "holds" if pairs else UNKNOWN
        if above:
            verdict = f"does not hold here: {', '.join(above)} before {name}"
        elif pairs and len(equal) == len(pairs):
            verdict = _no_order(equal, samples)
        elif equal:
            others = " and ".join(a for a, _ in equal)
            verdict = f"holds, but {others} and {name} {_equality(equal, samples)}"
        text = ", ".join(f"{each} {shown(values)} {unit}" for each, values in samples.items())
        return Statement(what, text or "-", published, verdict, source, agrees)

    return judged(judge, ours)


def tied(first: Sequence[float], second: Sequence[float]) -> bool:
    """Returns whether the means over seeds are the same, or the confidence interval of the paired
    differences includes zero."""
    mean, half = interval([a - b for a, b in zip(first, second, strict=True)])
    return same(fmean(first), fmean(second)) or abs(mean) <= half


def _below(first: Sequence[float], second: Sequence[float], smaller: bool) -> bool:
    worse = is_worse(fmean(first), fmean(second), smaller=smaller)
    return worse and not tied(first, second)


def same(first: float, second: float) -> bool:
    """Returns whether two figures differ by at most EQUAL of the larger one."""
    return abs(first - second) <= EQUAL * max(abs(first), abs(second))


def is_worse(first: float, second: float, *, smaller: bool = False) -> bool:
    """Returns whether `first` is worse than `second` by more than EQUAL.

    Args:
        smaller: True if smaller figures are better.
    """
    worse = first > second if smaller else second > first
    return worse and not same(first, second)


def cause(
    what: str, here: float | None, changed: float | None, *, wanted: float = 1 + EQUAL
) -> Statement:
    """Returns the statement of an ablation of a factor that is not as published.

    The change is the cause if it increases the factor to `wanted`. Callers omit the ablation if the
    statement agrees.

    Args:
        here: Factor of the study.
        changed: Factor at the same points with one change of the setup.
    """

    def judge(samples: Samples) -> Statement:
        text, verdict = "-", "cannot be formed here"
        if len(samples) == 2:
            text = ", changed ".join(map(times, samples.values()))
            before, after = samples.values()
            means = fmean(before), fmean(after)
            unsure = tied(before, after) and not same(*means)
            verdict = UNKNOWN if unsure else _explains(*means, wanted=wanted)
        return Statement(f"ablation: {what}", text, "not published", verdict, "ours")

    return judged(judge, {"here": here, "changed": changed})


def _explains(here: float, changed: float, *, wanted: float) -> str:
    if here >= wanted or changed <= here * (1 + EQUAL):
        return "is not the cause"
    return "names the cause" if changed >= wanted else "in its direction"


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns the ratio; None if either figure is missing or zero."""
    return above / below if above and below else None
