"""Find stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete; neither it nor what follows comes out.

    The first stop string to be completed wins, the longer one where two end together, so the
    result does not depend on how the text was cut into pieces. Text that may be the beginning
    of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.wanted = bool(stops)  # without any, text may go out as it is
        self._held = ""
        self.stopped = False
        self.found: str | None = None  # the one that was completed

    def push(self, text: str) -> str:
        """Text that may go out now. REQUIRES: not stopped."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            end, begin = min(found)
            self.found = text[begin:end]
            return text[:begin]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
