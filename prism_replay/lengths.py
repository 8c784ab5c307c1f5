"""Sources of the token counts of generated requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism_replay.trace import TOKENS_MAX, Trace, TraceRequest

Floats = NDArray[np.float64]


class LengthSource(Protocol):
    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Returns `count` pairs of (input, output) tokens, each at least 1."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts, clipped to [1, max].

    The defaults, after clipping, have the medians and means of the public Chatbot Arena sample:
    40 and 136 input tokens, 211 and 256 output tokens.
    """

    input_median: float = 40.0
    input_sigma: float = 1.78
    input_max: int = 1024
    output_median: float = 211.0
    output_sigma: float = 0.62
    output_max: int = 1024

    def __post_init__(self) -> None:
        """Raises ConfigError if a token count is out of range."""
        for key in ("input_median", "input_max", "output_median", "output_max"):
            tokens = getattr(self, key)
            if not 1 <= tokens <= TOKENS_MAX:
                raise ConfigError(f"{key}: {tokens:g} must be between 1 and {TOKENS_MAX}")

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        inputs = _log_normal(self.input_median, self.input_sigma, self.input_max, count, rng)
        outputs = _log_normal(self.output_median, self.output_sigma, self.output_max, count, rng)
        return list(zip(inputs, outputs, strict=True))


ARENA = Lengths()
SHAREGPT = Lengths(
    input_median=69,
    input_sigma=1.3,
    input_max=2048,
    output_median=207,
    output_sigma=1.0,
    output_max=2048,
)
"""Log-normals with the means that MuxServe reports for ShareGPT: 161 input tokens, 338 output."""


@dataclass(frozen=True)
class EmpiricalLengths:
    """Source that draws (input, output) pairs of another trace with replacement."""

    pairs: tuple[tuple[int, int], ...]

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        return [self.pairs[index] for index in rng.integers(len(self.pairs), size=count)]


@dataclass(frozen=True)
class QuantileLengths:
    """Source that draws input and output tokens independently from quantiles at `levels`."""

    levels: Floats
    inputs: Floats
    outputs: Floats

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        drawn = (
            np.maximum(1, np.rint(np.interp(rng.random(count), self.levels, values))).astype(int)
            for values in (self.inputs, self.outputs)
        )
        return [(int(i), int(o)) for i, o in zip(*drawn, strict=True)]


def lengths_of(trace: Trace) -> EmpiricalLengths:
    """Returns the lengths of `trace` as a source for other traces."""
    return EmpiricalLengths(tuple((r.input_length, r.output_length) for r in trace))


def requests_at(
    model: str, moments_s: Floats, lengths: LengthSource, rng: np.random.Generator
) -> list[TraceRequest]:
    """Returns one request at each of `moments_s`, with lengths drawn from `lengths`."""
    drawn = lengths.sample(len(moments_s), rng)
    return [
        TraceRequest(timestamp=round(moment * 1000), model=model, input_length=i, output_length=o)
        for moment, (i, o) in zip(moments_s.tolist(), drawn, strict=True)
    ]


def _log_normal(
    median: float, sigma: float, maximum: int, size: int, rng: np.random.Generator
) -> list[int]:
    drawn = rng.lognormal(math.log(median), sigma, size)
    return [int(tokens) for tokens in np.clip(np.rint(drawn), 1, maximum)]
