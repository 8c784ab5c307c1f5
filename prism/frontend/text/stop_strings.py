"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Filter that passes text through until a stop string is complete, and drops it and the rest.

    The first completed stop string wins, and the longer one if two end together, so that the result
    does not depend on how the text is cut. Text that may begin a stop string is held back. The time
    per character does not depend on the length of the strings (Knuth, Morris, Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.wanted = bool(stops)  # otherwise text need not be pushed
        self._held = ""
        self._matched = [0] * len(
            self._stops
        )  # length of each one's prefix that the text ends with
        self._borders = [_borders(stop) for stop in self._stops]
        self.stopped = False
        self.found: str | None = None  # the completed stop string

    def push(self, text: str) -> str:
        """Appends text and returns the text that can be sent. REQUIRES: not stopped."""
        if not self._stops:
            return text
        for end, letter in enumerate(text, start=len(self._held) + 1):
            self._take(letter)
            if self.found is not None:
                text, self._held = self._held + text, ""
                self.stopped = True
                return text[: end - len(self.found)]
        text = self._held + text
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _take(self, letter: str) -> None:
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != letter:
                matched = self._borders[number][matched - 1]
            matched += stop[matched] == letter
            self._matched[number] = matched
            if matched == len(stop) and len(stop) > len(self.found or ""):
                self.found = stop


@lru_cache(maxsize=1024)
def _borders(stop: str) -> list[int]:
    """Returns, for each prefix of `stop`, the length of its longest proper prefix that ends it."""
    borders, length = [0], 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = borders[length - 1]
        length += stop[length] == letter
        borders.append(length)
    return borders
