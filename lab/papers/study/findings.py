"""Results of a study: comparisons of our figures with the published ones, with verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

EQUAL = 0.02
"""Largest relative difference of figures that count as equal."""


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

    Args:
        published: None if the paper only says that its system is better.
    """
    said = "better" if published is None else f"{published:.2f}x"
    if ours is None:
        return Statement(what, "-", said, "cannot be formed here", source)
    if abs(ours - 1) <= EQUAL:
        return Statement(what, f"{ours:.2f}x", said, "no difference here", source, False)
    if ours < 1:
        return Statement(what, f"{ours:.2f}x", said, "the other way round", source, False)
    verdict = "same direction"
    if published is not None:
        verdict += f", {ours / published:.2f} of the published factor"
    return Statement(what, f"{ours:.2f}x", said, verdict, source, True)


def value(
    what: str,
    ours: float | None,
    published: float,
    source: str,
    *,
    unit: str = "",
    within: float = 0.25,
) -> Statement:
    """Compares a figure, which agrees if it is within a fraction of the published one."""
    said = f"{published:.4g} {unit}".strip()
    if ours is None:
        return Statement(what, "-", said, "cannot be formed here", source)
    near = abs(ours - published) <= within * abs(published)
    verdict = "same" if abs(ours - published) <= EQUAL * abs(published) else "near" if near else ""
    if not verdict:
        verdict = f"{ours / published:.2f} of the published" if published else "differs"
    return Statement(what, f"{ours:.4g} {unit}".strip(), said, verdict, source, near)


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
    if ours is None:
        said = f"{published:.4g} {unit}".strip()
        return Statement(
            what, f"not up to {most:.4g}", said, "not reached here", source, agrees=False
        )
    return value(what, ours, published, source, unit=unit, within=within)


def claim(what: str, holds: bool | None, ours: str, published: str, source: str) -> Statement:
    verdict = {True: "holds", False: "does not hold here", None: "cannot be said here"}[holds]
    return Statement(what, ours, published, verdict, source, holds)


def unpublished(what: str, ours: float | None, source: str) -> Statement:
    """Returns a statement of our factor, which the paper's text lacks."""
    shown = "-" if ours is None else f"{ours:.2f}x"
    return Statement(what, shown, "not published", "not counted", source)


def order(
    what: str,
    ours: Mapping[str, float | None],
    published: Sequence[str | tuple[str, ...]],
    source: str,
    *,
    smaller: bool = False,
) -> Statement:
    """Compares an order of systems.

    A pair differs if our figures have the reverse order by more than EQUAL, and is tied if they are
    within EQUAL. With a tie, the statement neither agrees nor disagrees.

    Args:
        published: Names, best first. The paper does not order the names within a tuple. Names that
            are not in `ours` are left out.
        smaller: True if smaller figures are better.
    """
    levels = [(names,) if isinstance(names, str) else names for names in published]
    places = {name: place for place, names in enumerate(levels) for name in names}
    known = {n: v for n, v in ours.items() if v is not None and n in places}
    names = [name for name in places if name in known]
    pairs = [(a, b) for a in names for b in names if places[a] < places[b]]
    wrong = [(a, b) for a, b in pairs if is_worse(known[a], known[b], smaller=smaller)]
    tied = [(a, b) for a, b in pairs if same(known[a], known[b])]
    shown, said = _ranked(known, smaller), " > ".join(", ".join(names) for names in levels)
    if not pairs:
        return Statement(what, shown or "-", said, "cannot be said here", source)
    agrees = False if wrong else None if tied else True
    verdict = _ordered(wrong, tied, len(pairs))
    return Statement(what, shown, said, verdict, source, agrees)


def _ordered(wrong: Sequence[tuple[str, str]], tied: Sequence[tuple[str, str]], pairs: int) -> str:
    if len(tied) == pairs:
        return "no difference here"
    verdict = "same order"
    if wrong:
        listed = ", ".join(f"{b} before {a}" for a, b in wrong)
        verdict = f"differs in {len(wrong)} of {pairs} pairs: {listed}"
    equal = ", ".join(f"{a} and {b}" for a, b in tied)
    return f"{verdict}, but {equal} are equal here" if tied else verdict


def _ranked(known: Mapping[str, float], smaller: bool) -> str:
    """Returns the names and figures, best first, with "=" between tied neighbours."""
    names = sorted(known, key=lambda name: known[name] if smaller else -known[name])
    parts = [f"{name} {known[name]:.4g}" for name in names]
    for i, (a, b) in enumerate(pairwise(names), 1):
        parts[i] = f"{'=' if same(known[a], known[b]) else '>'} {parts[i]}"
    return " ".join(parts)


def best(
    what: str, name: str, ours: Mapping[str, float], published: str, source: str, *, shown: str
) -> Statement:
    """Compares the name with the largest figure.

    With a tie, the statement neither agrees nor disagrees.
    """
    others = [other for other in ours if other != name]
    above = [other for other in others if is_worse(ours[name], ours[other])]
    tied = [other for other in others if same(ours[name], ours[other])]
    if above:
        verdict = f"does not hold here: {', '.join(above)} before {name}"
    elif others and len(tied) == len(others):
        verdict = "no difference here"
    elif tied:
        verdict = f"holds, but {' and '.join((*tied, name))} are equal here"
    else:
        verdict = "holds" if others else "cannot be said here"
    agrees = False if above else None if tied or not others else True
    return Statement(what, shown, published, verdict, source, agrees)


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
    shown = "-" if here is None or changed is None else f"{here:.2f}x, changed {changed:.2f}x"
    verdict = "cannot be formed here"
    if here is not None and changed is not None:
        verdict = _explains(here, changed, wanted)
    return Statement(f"ablation: {what}", shown, "not published", verdict, "ours")


def ablated(changed: Statement) -> Statement:
    """Returns the ablation of a statement that does not hold.

    Args:
        changed: The statement with one change of the setup.
    """
    verdict = "names the cause" if changed.agrees else f"is not the cause: {changed.verdict}"
    what = f"ablation: {changed.what}"
    return msgspec.structs.replace(changed, what=what, verdict=verdict, source="ours", agrees=None)


def _explains(here: float, changed: float, wanted: float) -> str:
    if here >= wanted or changed <= here * (1 + EQUAL):
        return "is not the cause"
    return "names the cause" if changed >= wanted else "in its direction"


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns the ratio; None if either figure is missing or zero."""
    return above / below if above and below else None
