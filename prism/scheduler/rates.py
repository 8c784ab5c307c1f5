"""Token rates of models over a sliding window, from counters that agents report.

A model's token rate counts prompt tokens of admitted requests and decoded tokens (Prism §6.2).
Not thread-safe; owns no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Source:
    """A device's counters as last seen, under one epoch of its agent."""

    epoch: int
    totals: dict[str, int] = field(default_factory=dict)


class TokenRates:
    """Rates over the last `window_s` seconds, in tokens/s.

    What counters held when a device was first seen is not counted. A counter that fell has
    started again at zero, and so have those that are missing when the epoch changes: the agent
    has restarted (an agent that only took its lease anew goes on counting).
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._sources: dict[str, _Source] = {}
        self._events: deque[tuple[float, str, int]] = deque()  # oldest first
        self._sums: Counter[str] = Counter()
        self._since_s: float | None = None

    def observe(self, device: str, epoch: int, totals: Mapping[str, int], now_s: float) -> None:
        """`totals`: model -> prompt plus output tokens since the agent or engine started."""
        if self._since_s is None:
            self._since_s = now_s
        source = self._sources.get(device)
        if source is None:
            self._sources[device] = _Source(epoch, dict(totals))
            return
        if source.epoch != epoch:
            kept = {model: last for model, last in source.totals.items() if model in totals}
            source = self._sources[device] = _Source(epoch, kept)
        for model, total in totals.items():
            last = source.totals.get(model, 0)
            grown = total - last if total >= last else total
            source.totals[model] = total
            if grown > 0:
                self._events.append((now_s, model, grown))
                self._sums[model] += grown

    def rates(self, now_s: float) -> dict[str, float]:
        """Model -> tokens/s; models without a token in the window are left out.

        A window that has only begun is divided by its length so far, at least one second.
        """
        since_s = now_s if self._since_s is None else self._since_s
        length_s = max(min(self.window_s, now_s - since_s), 1.0)
        until_s, events = now_s - self.window_s, self._events
        while events and events[0][0] <= until_s:
            _, model, grown = events.popleft()
            self._sums[model] -= grown
        return {model: tokens / length_s for model, tokens in self._sums.items() if tokens > 0}
