"""Attainment of the end-to-end SLO, from counters that agents report."""

from __future__ import annotations

from collections.abc import Iterable

from prism.messages.agent import ModelReport

Counts = tuple[int, int]
"""Requests that ended, and those of them that met their end-to-end SLO."""


class Attainment:
    """Requests that have ended since `reset`, and those that met their end-to-end SLO. Cancelled
    ones do not count.

    The first counters of a device are the baseline. Those that fell have restarted at zero.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Counts]] = {}  # device -> model -> counters
        self.reset()

    def reset(self) -> None:
        self.ended = self.met = 0

    @property
    def attainment(self) -> float:
        """Fraction that met their SLO; 1 without requests."""
        return self.met / self.ended if self.ended else 1.0

    def observe(self, device: str, models: Iterable[ModelReport]) -> None:
        """Adds a report of a device."""
        known = device in self._last
        last = self._last.setdefault(device, {})
        for model in models:
            counts = (model.finished_total + model.failed_total, model.met_total)
            before = last.get(model.model, (0, 0)) if known else counts
            if counts[0] < before[0]:
                before = (0, 0)
            self.ended += counts[0] - before[0]
            self.met += counts[1] - before[1]
            last[model.model] = counts
