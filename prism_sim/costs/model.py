"""Interface for the times of engine steps, used by the simulator and by policies.

All functions are pure and deterministic, in seconds and tokens, for one (GPU, model, TP) with one
engine on the GPU. From `GpuUsage` a simulator derives how engines on the same GPU slow each other
down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

BANDWIDTH_SM_SHARE = 0.4
"""Part of the SMs that saturates memory bandwidth. With 30-50 % of the SMs decode steps are hardly
slower in MuxServe (Figure 3), while prefill slows down in proportion."""


class PromptChunk(NamedTuple):
    """Piece of a request's prompt: `tokens` new tokens after `context_tokens` already in KV."""

    tokens: int
    context_tokens: int = 0


class GpuUsage(NamedTuple):
    """Parts (0..1) of the compute and of the memory bandwidth that a step uses, averaged over the
    step. Both are idle during host time."""

    compute: float
    bandwidth: float


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
    Compute decreases in proportion, bandwidth only below BANDWIDTH_SM_SHARE."""
    bandwidth_share = min(1.0, sm_share / BANDWIDTH_SM_SHARE)
    return max(1.0, usage.compute / sm_share, usage.bandwidth / bandwidth_share)
