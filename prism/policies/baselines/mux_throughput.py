"""MuxServe's throughput estimator (§3.3, equation 3) and parallel candidates (Algorithm 2).

In a unit, prefills run one after another and decodes concurrently. A batch of b requests of model m
therefore takes the prefills of all models plus m's decode steps:
    throughput(m) = min(b / (sum of prefill_s over the unit + decode_s x output tokens), rate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prism.policies.placement import ModelSpecView, StepTimes

SM_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BATCH_MAX = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """Configuration of one model: TP degree, SM share of its decodes, batch (Algorithm 2)."""

    model: ModelSpecView
    tp: int
    sm_share: float
    batch: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """F of equation 2 for one unit."""

    # Sum over all models.
    throughput_rps: float = 0.0
    # Model -> batch size.
    batches: Mapping[str, int] | None = None
    # Largest ratio of a model's rate to its throughput at its largest batch; below 1 all requests
    # are served.
    strain: float = 0.0


def request_tokens(model: ModelSpecView) -> float:
    return model.prompt_tokens + model.output_tokens


def demand(model: ModelSpecView) -> float:
    """Returns the KV bytes per second, to which the model's fair share of blocks is proportional.

    This is R of equation 2, normalised by rates.
    """
    return model.rate_rps * request_tokens(model) * model.token_bytes


def decode_context(model: ModelSpecView) -> float:
    """Returns the mean context length over a request's decode steps."""
    return model.prompt_tokens + model.output_tokens / 2


def _prefill_s(c: Candidate, batch: int, times: StepTimes) -> float:
    return times.prefill_s(c.model.name, c.tp, batch, c.model.prompt_tokens, 1.0)


def _throughput_rps(c: Candidate, batch: int, prefills_s: float, times: StepTimes) -> float:
    """Returns equation 3 before its minimum with the rate."""
    model = c.model
    decode_s = times.decode_s(model.name, c.tp, batch, decode_context(model), c.sm_share)
    return batch / (prefills_s + decode_s * model.output_tokens)


def smallest_batch(limit: Candidate, others_s: float, times: StepTimes) -> tuple[float, int]:
    """Returns (throughput before the minimum, batch) of the smallest batch that meets the rate.

    The batch is `limit.batch` if none up to it meets the rate. Uses binary search.

    Args:
        others_s: Time of the prefills of the unit's other models.
    """

    def at(batch: int) -> float:
        return _throughput_rps(limit, batch, others_s + _prefill_s(limit, batch, times), times)

    low, high = 1, limit.batch
    while low < high:
        middle = (low + high) // 2
        if at(middle) >= limit.model.rate_rps:
            high = middle
        else:
            low = middle + 1
    return at(low), low


def candidates(
    model: ModelSpecView, times: StepTimes, kv_bytes: Mapping[int, int]
) -> dict[int, Candidate]:
    """Returns for each degree the fewest SMs that meet the rate of the model alone (Algorithm 2).

    If no share meets the rate, the result is all SMs and the largest batch. The paper leaves such a
    model out, which would leave its requests unserved.

    Args:
        kv_bytes: Degree -> KV memory of all its devices when the model is alone. Degrees that are
            not in it do not fit.
    """
    found: dict[int, Candidate] = {}
    for tp in model.tp_degrees:
        if tp in kv_bytes:
            found[tp] = _candidate(model, tp, batch_limit(model, kv_bytes[tp]), times)
    return found


def _candidate(model: ModelSpecView, tp: int, batch_max: int, times: StepTimes) -> Candidate:
    for sm_share in SM_SHARES:
        limit = Candidate(model, tp, sm_share, batch_max)
        rate, batch = smallest_batch(limit, 0.0, times)
        if rate >= model.rate_rps:
            return replace(limit, batch=batch)
    return limit


def batch_limit(model: ModelSpecView, kv_bytes: float) -> int:
    """Returns the number of requests of mean length whose KV fits."""
    each = max(1.0, request_tokens(model) * model.token_bytes)
    return max(1, min(BATCH_MAX, int(kv_bytes / each)))


def fair_shares(models: Sequence[ModelSpecView]) -> list[float]:
    """Returns the fractions of KV memory that equalise usage / demand (equation 2's constraint)."""
    total = sum(demand(m) for m in models)
    return [demand(m) / total if total > 0 else 1.0 / len(models) for m in models]


def estimate(unit: Sequence[Candidate], kv_bytes: int, times: StepTimes) -> Estimate:
    """Returns F(b, W_b) of a unit whose KV memory over all its devices is `kv_bytes`.

    The batches are the smallest that meet all rates together. Each is searched given the others'
    prefills, which only grow with their batches, until none grows. A batch is limited by the
    model's fair share of the KV memory. Decode shares with a sum above 1 are scaled down.
    """
    if not unit:
        return Estimate()
    limits = _limits(unit, kv_bytes)
    total = max(1.0, sum(c.sm_share for c in unit))
    shares = [replace(c, sm_share=c.sm_share / total) for c in unit]
    batches = _grow(shares, limits, times)
    rates = _rates(shares, batches, times)
    full = _rates(shares, limits, times)
    served = sum(min(r, c.model.rate_rps) for r, c in zip(rates, unit, strict=True))
    strain = max(c.model.rate_rps / r for r, c in zip(full, unit, strict=True))
    names = (c.model.name for c in unit)
    return Estimate(served, dict(zip(names, batches, strict=True)), strain)


def _limits(unit: Sequence[Candidate], kv_bytes: int) -> list[int]:
    models = [c.model for c in unit]
    pairs = zip(models, fair_shares(models), strict=True)
    return [batch_limit(model, kv_bytes * share) for model, share in pairs]


def _grow(unit: Sequence[Candidate], limits: Sequence[int], times: StepTimes) -> list[int]:
    batches = [1] * len(unit)
    largest = [replace(c, batch=limit) for c, limit in zip(unit, limits, strict=True)]
    while True:
        prefills = [_prefill_s(c, b, times) for c, b in zip(unit, batches, strict=True)]
        grown = [
            max(batches[i], smallest_batch(limit, sum(prefills) - prefills[i], times)[1])
            for i, limit in enumerate(largest)
        ]
        if grown == batches:
            return batches
        batches = grown


def _rates(unit: Sequence[Candidate], batches: Sequence[int], times: StepTimes) -> list[float]:
    """Returns equation 3 before its minimum, for each model of the unit."""
    prefills_s = sum(_prefill_s(c, b, times) for c, b in zip(unit, batches, strict=True))
    pairs = zip(unit, batches, strict=True)
    return [_throughput_rps(c, batch, prefills_s, times) for c, batch in pairs]
