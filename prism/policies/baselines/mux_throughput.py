"""MuxServe's throughput estimator (MuxServe §3.3, equation 3) and its parallel candidates
(Algorithm 2).

Prefills of a unit's models run one after another, decodes side by side, so that a batch of b
requests of model m takes the prefills of all models plus m's decode steps:
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
    """A way to run one model: degree, share of the compute for its decodes, batch (Algorithm 2)."""

    model: ModelSpecView
    tp: int
    sm_share: float
    batch: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """F of equation 2 for one unit."""

    # Of all models together.
    throughput_rps: float = 0.0
    # Of each model.
    batches: Mapping[str, int] | None = None
    # The largest rate / what the model could sustain at its largest batch; below 1 all is served.
    strain: float = 0.0


def request_tokens(model: ModelSpecView) -> float:
    return model.prompt_tokens + model.output_tokens


def demand(model: ModelSpecView) -> float:
    """KV bytes per second: the part of a unit's token blocks that is the model's fair share is
    proportional to this (R of equation 2, normalised by rates)."""
    return model.rate_rps * request_tokens(model) * model.token_bytes


def decode_context(model: ModelSpecView) -> float:
    """Mean context over a request's decode steps."""
    return model.prompt_tokens + model.output_tokens / 2


def _prefill_s(c: Candidate, batch: int, times: StepTimes) -> float:
    return times.prefill_s(c.model.name, c.tp, batch, c.model.prompt_tokens, 1.0)


def _throughput_rps(c: Candidate, batch: int, prefills_s: float, times: StepTimes) -> float:
    """Equation 3 before its minimum with the rate."""
    model = c.model
    decode_s = times.decode_s(model.name, c.tp, batch, decode_context(model), c.sm_share)
    return batch / (prefills_s + decode_s * model.output_tokens)


def smallest_batch(limit: Candidate, others_s: float, times: StepTimes) -> tuple[float, int]:
    """(throughput before the minimum, batch): the smallest batch up to `limit.batch` that meets the
    rate, by binary search, or `limit.batch`. others_s: the prefills of the unit's other models."""

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
    """Algorithm 2: for each degree, the fewest SMs that meet the rate when the model is alone.

    kv_bytes: degree -> KV memory of all its devices when the model is alone; degrees that are not
    in it do not fit. Where no share meets the rate, all SMs and the largest batch are taken: the
    paper leaves such a model out, which would leave its requests unserved.
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
    """Requests of mean length whose KV fits."""
    each = max(1.0, request_tokens(model) * model.token_bytes)
    return max(1, min(BATCH_MAX, int(kv_bytes / each)))


def fair_shares(models: Sequence[ModelSpecView]) -> list[float]:
    """The parts of the KV memory that make usage / demand equal (the constraint of equation 2)."""
    total = sum(demand(m) for m in models)
    return [demand(m) / total if total > 0 else 1.0 / len(models) for m in models]


def estimate(unit: Sequence[Candidate], kv_bytes: int, times: StepTimes) -> Estimate:
    """F(b, W_b) of a unit whose KV memory over all its devices is `kv_bytes`.

    The batches are the smallest that meet all rates together: each is searched given the others'
    prefills, which only grow with their batches, until none grows. No batch needs more than the
    model's fair share of the KV memory. Decoding shares that add up to more than the device are
    scaled down to it.
    """
    if not unit:
        return Estimate()
    limits = _limits(unit, kv_bytes)
    crowd = max(1.0, sum(c.sm_share for c in unit))
    shares = [replace(c, sm_share=c.sm_share / crowd) for c in unit]
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
    """Equation 3 before its minimum, for each model of the unit."""
    prefills_s = sum(_prefill_s(c, b, times) for c, b in zip(unit, batches, strict=True))
    pairs = zip(unit, batches, strict=True)
    return [_throughput_rps(c, batch, prefills_s, times) for c, batch in pairs]
