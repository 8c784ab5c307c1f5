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
    """Last counters of a device, in one epoch of its agent."""

    epoch: int
    totals: dict[str, int] = field(default_factory=dict)


class TokenRates:
    """Token rates over the last `window_s` seconds, in tokens/s.

    The first counters of a device are the baseline and count as no tokens. A counter that fell has
    restarted at zero. So have counters that are missing when the epoch changes, because the agent
    has restarted. An agent that only acquired its lease again keeps its counters.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._sources: dict[str, _Source] = {}
        self._events: deque[tuple[float, str, int]] = deque()  # oldest first
        self._sums: Counter[str] = Counter()
        self._since_s: float | None = None

    def observe(self, device: str, epoch: int, totals: Mapping[str, int], now_s: float) -> None:
        """Adds a report.

        Args:
            totals: model -> prompt plus output tokens since the agent or engine started.
        """
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
        """Returns model -> tokens/s, without models that have no token in the window.

        While the first window is incomplete, its length so far is used, at least one second.
        """
        since_s = now_s if self._since_s is None else self._since_s
        length_s = max(min(self.window_s, now_s - since_s), 1.0)
        until_s, events = now_s - self.window_s, self._events
        while events and events[0][0] <= until_s:
            _, model, grown = events.popleft()
            self._sums[model] -= grown
        return {model: tokens / length_s for model, tokens in self._sums.items() if tokens > 0}
