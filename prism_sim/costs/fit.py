"""Fit of a step table to measured steps, by least squares.

The unknowns are the dense part at a few token counts, the seconds per pair of tokens (prefill
attention), the seconds per token of context (decode attention), and a constant per request. All are
>= 0 and the dense part does not decrease, as a table requires. Errors are relative to the measured
time, and large errors count linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prism.errors import ConfigError
from prism_sim.costs.table import StepTable, TableCost, linear_decode

Floats = NDArray[np.float64]
PROMPTS_MIN = 3
KNOT_RATIO = 2.0
REWEIGHTED = 10
EXACT = 1e-6
STRAIGHT_FROM = 4
"""The dense part is linear beyond a quarter of the longest prompt, where any curvature is due to
attention."""


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step."""

    # True for a prompt, False for decodes.
    prompt: bool
    # Prompt tokens, or number of decoding requests.
    tokens: int
    # KV tokens that the decodes read; 0 for a prompt.
    context_tokens: int
    # For a prompt, includes the time of a request outside of steps.
    seconds: float


@dataclass(frozen=True)
class Fitted:
    """Result of a fit."""

    table: StepTable
    # predicted / measured - 1 of each measured step.
    errors: tuple[float, ...]


def fit(steps: Sequence[MeasuredStep], gpu: str, model: str, tp: int, source: str) -> Fitted:
    """Fits a table to measured steps. Raises ConfigError if they do not determine the unknowns."""
    _check(steps)
    knots = dense_knots(steps)
    seconds = np.array([step.seconds for step in steps])
    matrix = np.array([_row(step, knots) for step in steps])
    solution = robust_least_squares(matrix / seconds[:, None], np.ones(len(steps)))
    request_s, pair_s, context_s = (float(value) for value in solution[:3])
    dense_s = np.cumsum(solution[3:])
    batches, contexts, decode_s = linear_decode(context_s)
    table = StepTable(
        gpu=gpu,
        model=model,
        tp=tp,
        source=source,
        dense_tokens=tuple(knots),
        dense_s=tuple(float(value) for value in dense_s),
        pair_s=pair_s,
        request_s=request_s,
        decode_batch=batches,
        decode_context=contexts,
        decode_s=decode_s,
    )
    cost = TableCost(table)
    return Fitted(table, tuple(predict(cost, step) / step.seconds - 1 for step in steps))


def predict(cost: TableCost, step: MeasuredStep) -> float:
    if step.prompt:
        return cost.table.request_s + cost.prefill_s(step.tokens)
    return cost.decode_s(step.tokens, step.context_tokens)


def dense_knots(steps: Sequence[MeasuredStep]) -> list[float]:
    """Returns the token counts at which the slope of the dense part may change.

    They are measured counts, each at least twice the previous one. The shortest prompt is excluded
    unless as many requests decoded together: a slope up to that prompt cannot be distinguished from
    the constant per request, and the fit would attribute all of it to the constant.
    """
    end = max(max(step.tokens for step in steps if step.prompt) / STRAIGHT_FROM, 2.0)
    shortest = min(step.tokens for step in steps if step.prompt)
    decoded = max((step.tokens for step in steps if not step.prompt), default=0)
    knots = [1.0]
    for tokens in sorted({step.tokens for step in steps}):
        if tokens == shortest > decoded:
            continue
        if knots[-1] * KNOT_RATIO <= tokens <= end:
            knots.append(float(tokens))
    return knots if len(knots) > 1 else [1.0, end]


def robust_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Returns the least squares with Huber's weights, where outliers such as disturbed steps count
    by their error instead of its square."""
    found = least_squares(matrix, target)
    for _ in range(REWEIGHTED):
        errors = np.abs(matrix @ found - target)
        if errors.max() < EXACT:
            break
        near = 1.5 * max(float(np.median(errors)), EXACT)
        weights = np.sqrt(np.minimum(1.0, near / np.maximum(errors, 1e-12)))
        found = least_squares(matrix * weights[:, None], target * weights)
    return found


def least_squares(matrix: Floats, target: Floats) -> Floats:
    """Returns x >= 0 that minimises |matrix x - target| (Lawson and Hanson, Solving Least Squares
    Problems, chapter 23). Unknowns enter one by one; those that would become negative leave."""
    size = matrix.shape[1]
    found, free = np.zeros(size), np.zeros(size, dtype=bool)
    for _ in range(10 * size):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        found = _descend(matrix, target, found, free)
    return found


def _descend(matrix: Floats, target: Floats, found: Floats, free: NDArray[np.bool_]) -> Floats:
    """Returns the least squares over the unknowns in `free`. Removes those from `free` that would
    be <= 0."""
    while True:
        step = np.zeros(len(found))
        step[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        falling = free & (step <= 0)
        if not falling.any():
            return step
        ratio = found[falling] / np.maximum(found[falling] - step[falling], 1e-300)
        found = found + float(ratio.min()) * (step - found)
        free &= found > 1e-15
        found[~free] = 0.0


def _row(step: MeasuredStep, knots: Sequence[float]) -> list[float]:
    pairs = step.tokens * (step.tokens + 1) / 2 if step.prompt else 0.0
    return [float(step.prompt), pairs, float(step.context_tokens), *_rises(step.tokens, knots)]


def _rises(tokens: float, knots: Sequence[float]) -> list[float]:
    """Returns 1 and, for each piece of the dense part, the position of `tokens` on it. Positions
    are clipped to 0..1, except at the open end of the last piece."""
    along = [(tokens - low) / (high - low) for low, high in pairwise(knots)]
    return [1.0, *(min(max(part, 0.0), 1.0) for part in along[:-1]), max(along[-1], 0.0)]


def _check(steps: Sequence[MeasuredStep]) -> None:
    prompts = {step.tokens for step in steps if step.prompt}
    decodes = {(step.tokens, step.context_tokens) for step in steps if not step.prompt}
    if len(prompts) < PROMPTS_MIN or len({context for _, context in decodes}) < 2:
        raise ConfigError(
            f"calibration: {len(prompts)} prompt lengths and {len(decodes)} decode batches are too"
            f" few; give at least {PROMPTS_MIN} prompt lengths and 2 contexts"
        )
    if any(not 0 < step.seconds < float("inf") for step in steps):
        raise ConfigError("calibration: a step took no time; measure with more tokens")
