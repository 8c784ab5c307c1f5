"""A figure that a run must yield, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass

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
