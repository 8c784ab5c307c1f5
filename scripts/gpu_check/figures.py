"""Figures that a run must yield: the reference of each, and what is expected of it.

    python -m scripts.gpu_check.figures          the table of docs/gpu-results.md

The reference is taken on the same GPU in the same run, so that a ratio comes back and not only a
time. An expectation is stated before the figure is taken; a figure that misses it fails no step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MET, MISSED, NOT_JUDGED = "met", "missed", "not judged"


@dataclass(frozen=True, slots=True)
class Expected:
    """A figure of a step.

    Bounds are of the ratio value / reference where `of_ratio`, of the value otherwise. A figure
    without bounds is recorded and not judged.
    """

    step: str
    name: str
    what: str
    unit: str
    reference: str = ""
    at_most: float | None = None
    at_least: float | None = None
    of_ratio: bool = False
    source: str = ""

    def bound(self) -> str:
        """Returns the expectation in words."""
        what = "ratio" if self.of_ratio else self.unit
        if self.at_most is not None:
            return f"at most {self.at_most:g} {what}".strip()
        if self.at_least is not None:
            return f"at least {self.at_least:g} {what}".strip()
        return "none"

    def verdict(self, value: float, ratio: float | None) -> str:
        judged = ratio if self.of_ratio else value
        if judged is None or (self.at_most is None and self.at_least is None):
            return NOT_JUDGED
        low = float("-inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return MET if low <= judged <= high else MISSED


EXPECTED: tuple[Expected, ...] = (
    # The table is filled in below, by step.
)
BY_NAME = {(expected.step, expected.name): expected for expected in EXPECTED}


def figure(
    step: str, name: str, value: float, reference: float | None, *, judged: bool
) -> dict[str, Any]:
    """Returns a figure as it is kept in gpu-check.json. Raises KeyError for an unknown one."""
    expected = BY_NAME[step, name]
    ratio = value / reference if reference else None
    return {
        "value": round(value, 4),
        "unit": expected.unit,
        "reference": None if reference is None else round(reference, 4),
        "ratio": None if ratio is None else round(ratio, 4),
        "expected": expected.bound(),
        "verdict": expected.verdict(value, ratio) if judged else NOT_JUDGED,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Returns a figure on one line."""
    text = f"{name}: {found['value']:g} {found['unit']}".rstrip()
    if found["ratio"] is not None:
        text += f", {found['ratio']:g} of the reference"
    if found["verdict"] != NOT_JUDGED:
        text += f" (expected {found['expected']}: {found['verdict']})"
    return text


def table() -> str:
    """Returns the table of expectations in Markdown."""
    rows = ["| step | figure | what | unit | reference, in the same run | expected | source |"]
    rows.append("|---|---|---|---|---|---|---|")
    for e in EXPECTED:
        cells = (e.step, f"`{e.name}`", e.what, e.unit, e.reference or "none", e.bound(), e.source)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
