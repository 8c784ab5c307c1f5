"""The prefill speed that admission reckons with, measured by engines while they serve."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_TOKENS_PER_S = 1000.0
"""Of a model that has computed no prompt on its device yet."""
_DECAY = 0.8


@dataclass(slots=True)
class Speed:
    """Of one model; tokens_per_s is 0 before its first prefill. Decayed sums of tokens and seconds,
    so that long prefills weigh more than short ones."""

    tokens_per_s: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` of prompts, alone or beside decodes."""
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        if self._seconds > 0:
            self.tokens_per_s = self._tokens / self._seconds
