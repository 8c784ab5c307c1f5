"""Latencies of models that share the compute of a device, computed from their traffic.

In the papers a device's pressure is that of its KV memory alone. This is the pressure on its
compute: the requests that miss an SLO because of each other. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from prism.policies.data import Degree, ModelView, Traffic

MEETS = 0.7
"""A model meets its SLOs if its latencies are at most this part of them."""
LEAST_REQUESTS = 10
"""Number of requests from which latencies are computed."""


def is_known(model: ModelView) -> bool:
    """Returns True if the model has enough traffic, and its speed was measured."""
    if model.traffic.requests < LEAST_REQUESTS:
        return False
    degree = model.degrees.get(model.tp)
    return degree is not None and degree.prefill_tokens_per_s > 0


def late_rps(models: Collection[ModelView]) -> float:
    """Returns the requests per second that are late if these models share a device.

    The part of a model's requests that counts is 0 if it meets its SLOs (`MEETS`), and approaches 1
    with its lateness. A model of several devices counts on each for its part.
    """
    shares = [(model, busy_share(model)) for model in models]
    total = math.fsum(share for _, share in shares)
    late = math.fsum(
        model.traffic.rate_rps / model.tp * _late_part(lateness(model, model.tp, total - share))
        for model, share in shares
        if is_known(model)
    )
    # Sums in another order must compare as equal.
    return round(late, 3)


def _late_part(late: float) -> float:
    return 1.0 - MEETS / max(MEETS, late)


def busy_share(model: ModelView) -> float:
    """Returns the part of the time that the model computes on each of its devices; 0: unknown."""
    degree = model.degrees.get(model.tp)
    if degree is None or not degree.prefill_tokens_per_s or not model.traffic.rate_rps:
        return 0.0
    return sum(_shares(model.traffic, model.traffic.rate_rps, degree, model.slo_tpot_s))


def lateness(model: ModelView, tp: int, others: float) -> float:
    """Returns the larger of P99 TTFT and P99 TPOT over its SLO, at a degree.

    Args:
        others: Part of the time that other models keep the devices busy.
    """
    ttft_s, tpot_s = latencies(model.traffic, model.degrees[tp], model.slo_tpot_s, others)
    return max(ttft_s / model.slo_ttft_s, tpot_s / model.slo_tpot_s)


def latencies(
    traffic: Traffic, degree: Degree, slo_tpot_s: float, others: float
) -> tuple[float, float]:
    """Returns (P99 of TTFT, P99 of TPOT) in seconds at the peak rate; infinite if overloaded.

    Prompts wait for each other as in an M/G/1 queue (Pollaczek-Khinchine formula), with waiting
    times that are exponential above zero. Decode steps wait for prompts.
    """
    rate, left = traffic.peak_rps, 1.0 - others
    if left <= 0:
        return math.inf, math.inf
    prefill, decode = (share / left for share in _shares(traffic, rate, degree, slo_tpot_s))
    busy = prefill + decode
    if busy >= 1:
        return math.inf, math.inf
    tokens_per_s = degree.prefill_tokens_per_s * left
    squared_s = (traffic.prompt_tokens**2 + traffic.prompt_std_tokens**2) / tokens_per_s**2
    wait_s = rate * squared_s / 2 / (1 - busy)
    long_wait_s = wait_s / busy * math.log(max(1.0, 100 * busy)) if busy else 0.0
    ttft_s = max(
        traffic.prompt_p99_tokens / tokens_per_s + wait_s,
        traffic.prompt_tokens / tokens_per_s + long_wait_s,
    )
    batch = _batch(traffic, rate, slo_tpot_s)
    step_s = (degree.step_s + degree.request_s * batch) / left / (1 - prefill)
    # Prompts that interrupt a request of mean length: Poisson, 2.33 standard deviations for P99.
    spread_s = math.sqrt(rate * step_s * squared_s / max(2.0, traffic.output_tokens))
    return ttft_s, step_s + 2.33 * spread_s


def _shares(
    traffic: Traffic, rate: float, degree: Degree, slo_tpot_s: float
) -> tuple[float, float]:
    """Returns the parts of the time for prompts and for decode steps, without other models."""
    batch = _batch(traffic, rate, slo_tpot_s)
    steps_per_s = rate * traffic.output_tokens / batch
    return (
        rate * traffic.prompt_tokens / degree.prefill_tokens_per_s,
        steps_per_s * (degree.step_s + degree.request_s * batch),
    )


def _batch(traffic: Traffic, rate: float, slo_tpot_s: float) -> float:
    """Returns the requests that decode at a time at the pace of the SLO (Little's law)."""
    return max(1.0, rate * traffic.output_tokens * slo_tpot_s)
