"""Prefill speed, which engines measure while they serve and admission uses."""

from __future__ import annotations

from dataclasses import dataclass

# Speed of a model that has not computed a prompt on its device yet.
PRIOR_TOKENS_PER_S = 1000.0
_DECAY = 0.8


@dataclass(slots=True)
class Speed:
    """Prefill speed of one model, computed from decayed sums of tokens and seconds, so that long
    prefills have more weight than short ones."""

    # Current speed; 0 before the first prefill.
    tokens_per_s: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Records a step that computed `tokens` of prompts, with or without decodes."""
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        if self._seconds > 0:
            self.tokens_per_s = self._tokens / self._seconds
