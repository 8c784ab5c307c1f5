"""Synthetic prompts of an exact token count; equal block hashes give equal tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism.errors import ConfigError
from prism_replay.trace import TraceRequest

_OWN, _SHARED = 0, 1


@dataclass(frozen=True)
class PromptSource:
    seed: int = 0
    low: int = 100
    high: int = 1000
    """Ids are in [low, high), a range that every vocabulary has and without special tokens."""
    block_tokens: int = 512
    """Tokens that one of Mooncake's hash ids stands for."""

    def prompt(self, request: TraceRequest, index: int) -> str | list[int]:
        """The request's text, or `input_length` token ids.

        The k-th hash id decides the k-th block. Tokens without an id are drawn for this request
        (`index`) alone. Same seed, same tokens.
        """
        if request.prompt is not None:
            return request.prompt
        tokens: list[int] = []
        for block in request.hash_ids:
            if len(tokens) >= request.input_length:
                break
            tokens += self._draw(_SHARED, block, self.block_tokens)
        missing = request.input_length - len(tokens)
        if missing > 0:
            tokens += self._draw(_OWN, index, missing)
        return tokens[: request.input_length]

    def _draw(self, kind: int, number: int, size: int) -> list[int]:
        rng = np.random.default_rng([self.seed, kind, number])
        return [int(token) for token in rng.integers(self.low, self.high, size)]


def parse_token_range(text: str) -> tuple[int, int]:
    """`"100-1000"` to (100, 1000), the end excluded. Raises ConfigError."""
    try:
        low, high = (int(part) for part in text.split("-"))
    except ValueError as error:
        raise ConfigError(f"--token-ids {text!r}: write LOW-HIGH, such as 100-1000") from error
    if not 0 <= low < high:
        raise ConfigError(f"--token-ids {text!r}: LOW must be at least 0 and below HIGH")
    return low, high
