"""Interface for the times of engine steps, used by the simulator and by policies.

All functions are pure and deterministic, in seconds and tokens, for one (GPU, model, TP) with one
engine on the GPU. From `GpuUsage` a simulator derives how engines on the same GPU slow each other
down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

Row = tuple[float, ...]
PER_SHARE: Row = tuple(1 / share for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3))
"""1 / SM share of the two curves below."""
COMPUTE_SLOWER: Row = (1.0, 1.06, 1.14, 1.28, 1.42, 1.66, 2.08, 2.68)
"""Factor on a step that is bound by compute. Fitted, as is the other one, to MuxServe's steps of
LLaMA on one A100, where the tables have the measured times: docs/costs.md has the errors."""
BANDWIDTH_SLOWER: Row = (1.0, 1.0, 1.03, 1.04, 1.08, 1.12, 1.28, 1.52)
"""Factor on a step that is bound by memory bandwidth."""


class PromptChunk(NamedTuple):
    """Piece of a request's prompt: `tokens` new tokens after `context_tokens` already in KV."""

    tokens: int
    context_tokens: int = 0


class GpuUsage(NamedTuple):
    """Parts (0..1) of the compute and of the memory bandwidth that a step uses, averaged over the
    step. Both are idle during host time."""

    compute: float
    bandwidth: float
    # (1 / SM share, rising from 1; factor on the step's time there), if measured.
    slower: tuple[Row, Row] | None = None


class CostModel(Protocol):
    """Costs of one model on one GPU type at one TP degree.

    A step without work (no chunk, batch 0) takes 0 s.

    Args:
        batch: Number of requests that decode one token in the step.
        context_tokens: KV tokens that these requests read in the first step, summed over the batch.
    """

    def step_s(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> float:
        """Returns the time of a mixed step: prompt chunks and decodes in one forward pass."""
        ...

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """Returns the time of a step of one chunk."""
        ...

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Returns the time of a step of decodes only."""
        ...

    def decode_run_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """Returns the time of `steps` consecutive decode steps; the context grows by `batch` after
        each. Equals the sum of `decode_s` up to rounding, without a loop over the steps."""
        ...

    def decode_steps(self, batch: int, context_tokens: int, seconds: float, limit: int) -> int:
        """Returns the largest n <= limit with decode_run_s(batch, context_tokens, n) <= seconds."""
        ...

    def usage(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> GpuUsage:
        """Returns the step's use of the GPU."""
        ...


def prompt_s(model: CostModel, tokens: int, chunk_tokens: int, context_tokens: int = 0) -> float:
    """Returns the time of a whole prompt in chunks of at most `chunk_tokens`, alone in its
    steps."""
    starts = range(0, tokens, chunk_tokens)
    return sum(
        model.prefill_s(min(chunk_tokens, tokens - start), context_tokens + start)
        for start in starts
    )


def slowdown(usage: GpuUsage, sm_share: float) -> float:
    """Returns the factor >= 1 on the time of a step that gets `sm_share` (0..1] of the GPU's SMs.

    It is linear in 1 / share between measured shares and below them, as is the time of a step of
    which a part runs on the SMs of the share and another part does not depend on them.
    """
    if usage.slower is not None:
        return interpolate(*usage.slower, 1 / sm_share)
    compute, bandwidth = (
        interpolate(PER_SHARE, curve, 1 / sm_share) for curve in (COMPUTE_SLOWER, BANDWIDTH_SLOWER)
    )
    return 1 + max(usage.compute * (compute - 1), usage.bandwidth * (bandwidth - 1))


def interpolate(knots: Row, values: Row, x: float) -> float:
    """Returns the value at x: linear between knots, with the last slope beyond them, and the first
    value before them."""
    if x <= knots[0] or len(knots) == 1:
        return values[0]
    piece, part = place(knots, x)
    return values[piece] + part * (values[piece + 1] - values[piece])


def place(knots: Row, x: float) -> tuple[int, float]:
    """Returns the piece of x, and the position of x on it (below 0 or above 1 beyond the ends)."""
    piece = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 2)
    return piece, (x - knots[piece]) / (knots[piece + 1] - knots[piece])
