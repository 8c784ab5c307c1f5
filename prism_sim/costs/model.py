"""The interface through which the simulator and policies ask how long an engine's steps take.

All functions are pure and deterministic, in seconds and tokens, for one (GPU, model, TP): a GPU
that the engine has to itself. `GpuUsage` says what a step needs of the GPU, from which a simulator
derives what engines that share one do to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

BANDWIDTH_SM_SHARE = 0.4
"""SMs that saturate memory bandwidth: with 30-50 % of them MuxServe (Figure 3) sees decode steps
hardly slower, where prefill slows down in proportion."""


class PromptChunk(NamedTuple):
    """A piece of one request's prompt: `tokens` new ones after `context_tokens` already in KV."""

    tokens: int
    context_tokens: int = 0


class GpuUsage(NamedTuple):
    """Parts (0..1) of the compute and of the memory bandwidth that a step keeps busy, averaged
    over the step. Host time leaves both idle."""

    compute: float
    bandwidth: float


class CostModel(Protocol):
    """Costs of one model on one GPU type at one TP degree.

    batch: requests that decode one token in the step. context_tokens: KV tokens that these read,
    summed over the batch, at the first step. A step without work (no chunk, batch 0) takes 0 s.
    """

    def step_s(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> float:
        """A mixed step: prompt chunks and decodes in one forward pass."""
        ...

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        """A step of one chunk."""
        ...

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """A step of decodes only."""
        ...

    def decode_run_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """`steps` consecutive decode steps, the context growing by `batch` after each: equal to
        the sum of `decode_s` to rounding, without a loop over the steps."""
        ...

    def decode_steps(self, batch: int, context_tokens: int, seconds: float, limit: int) -> int:
        """The most steps n <= limit with decode_run_s(batch, context_tokens, n) <= seconds."""
        ...

    def usage(self, chunks: Sequence[PromptChunk], batch: int, context_tokens: int) -> GpuUsage:
        """What the step keeps busy of the GPU."""
        ...


def prompt_s(model: CostModel, tokens: int, chunk_tokens: int, context_tokens: int = 0) -> float:
    """A whole prompt in chunks of at most `chunk_tokens`, nothing else in its steps."""
    starts = range(0, tokens, chunk_tokens)
    return sum(
        model.prefill_s(min(chunk_tokens, tokens - start), context_tokens + start)
        for start in starts
    )


def slowdown(usage: GpuUsage, sm_share: float) -> float:
    """Factor >= 1 on the time of a step that gets `sm_share` (0..1] of the GPU's SMs: compute
    falls in proportion, bandwidth only below BANDWIDTH_SM_SHARE."""
    bandwidth_share = min(1.0, sm_share / BANDWIDTH_SM_SHARE)
    return max(1.0, usage.compute / sm_share, usage.bandwidth / bandwidth_share)
