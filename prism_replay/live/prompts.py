"""Synthetic prompts of an exact token count. Equal hash ids give blocks of equal tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism.errors import ConfigError
from prism_replay.trace import TraceRequest

_OWN, _SHARED = 0, 1


@dataclass(frozen=True)
class PromptSource:
    """Source of the prompts of a trace's requests."""

    seed: int = 0
    low: int = 100
    """Lowest token id. The default range is in every vocabulary and has no special tokens."""
    high: int = 1000
    """End of the range of token ids, excluded."""
    block_tokens: int = 512
    """Number of tokens of the block of one hash id."""

    def prompt(self, request: TraceRequest, index: int) -> str | list[int]:
        """Returns the request's text, or `input_length` token ids.

        The k-th hash id determines the k-th block. The tokens after the last block depend on the
        request's `index`. The same seed gives the same tokens.
        """
        if request.prompt is not None:
            return request.prompt
        tokens: list[int] = []
        for block in request.hash_ids:
            if len(tokens) >= request.input_length:
                break
            tokens += self._draw(_SHARED, block, self.block_tokens)
        remaining = request.input_length - len(tokens)
        if remaining > 0:
            tokens += self._draw(_OWN, index, remaining)
        return tokens[: request.input_length]

    def _draw(self, kind: int, number: int, size: int) -> list[int]:
        rng = np.random.default_rng([self.seed, kind, number])
        return [int(token) for token in rng.integers(self.low, self.high, size)]


def parse_token_range(text: str) -> tuple[int, int]:
    """Parses "100-1000" to (100, 1000), the end excluded. Raises ConfigError."""
    try:
        low, high = (int(part) for part in text.split("-"))
    except ValueError as error:
        raise ConfigError(f"--token-ids {text!r}: write LOW-HIGH, such as 100-1000") from error
    if not 0 <= low < high:
        raise ConfigError(f"--token-ids {text!r}: LOW must be >= 0 and < HIGH")
    return low, high
