"""Tensor-parallel degrees of the prism policy: the least one that meets the SLOs.

In the papers the degree of a model is given. Here a model may name degrees, of which the policy
chooses by the model's traffic. Latencies are computed for the busiest interval of the traffic, on
devices that other models keep busy for a part of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import structs

from prism.policies import kvpr
from prism.policies.bins import Bin, devices_of, need_bytes, part
from prism.policies.data import ClusterView, Degree, ModelView, Traffic
from prism.policies.planning.balance import migrate
from prism.policies.planning.builder import PlanBuilder

LEAST_REQUESTS = 10
"""Number of requests from which a degree may change."""
MEETS = 0.7
"""A degree is chosen if its latencies are at most this part of the SLOs."""
LOWERS = 0.4
"""The degree is lowered if the latencies of a lower one are at most this part of the SLOs."""
BETTER = 0.8
"""If no degree meets the SLOs, a higher one must have at most this part of the present latency."""


def at_degree(model: ModelView, tp: int) -> ModelView:
    """Returns the model at another degree, on no device."""
    degree = model.degrees[tp]
    return structs.replace(
        model,
        tp=tp,
        weight_bytes=degree.weight_bytes,
        token_bytes=degree.token_bytes,
        kv_floor_bytes=degree.kv_floor_bytes,
        device=None,
        peers=(),
        state="absent",
    )


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


def higher(model: ModelView, others: float) -> list[int]:
    """Returns the degrees to raise the model to, best first; empty if its own is enough.

    Those that meet the SLOs come first, the least of them at the front, then the least late.
    """
    if not _is_known(model) or (now := lateness(model, model.tp, others)) <= 1.0:
        return []
    found = [
        (max(MEETS, late), tp)
        for tp in model.degrees
        if tp > model.tp and (late := lateness(model, tp, others)) < min(BETTER * now, math.inf)
    ]
    return [tp for _, tp in sorted(found)]


def lower(model: ModelView, others: float) -> int | None:
    """Returns the least degree that is enough with a wide margin, below the present one."""
    if not _is_known(model):
        return None
    below = (tp for tp in sorted(model.degrees) if tp < model.tp)
    return next((tp for tp in below if lateness(model, tp, others) <= LOWERS), None)


def to_activate(model: ModelView) -> ModelView:
    """Returns an absent model at the degree that its traffic needs, or else at the least one."""
    better = higher(model, 0.0) if model.pinned_device is None else []
    return at_degree(model, better[0]) if better else model


def _is_known(model: ModelView) -> bool:
    if len(model.degrees) < 2 or model.traffic.requests < LEAST_REQUESTS:
        return False
    return model.degrees[model.tp].prefill_tokens_per_s > 0


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


# --- changes of degree ---------------------------------------------------------------------

MakeRoom = Callable[[PlanBuilder, ModelView, Collection[Bin]], bool]
"""Evicts idle models so that all parts of a model fit into some of the bins. Returns False if it
evicts none."""


def shares(models: Iterable[ModelView]) -> dict[str, float]:
    """Returns device -> the part of the time that its models compute, for busy devices."""
    found: dict[str, float] = {}
    for model in models:
        if share := busy_share(model):
            for device in devices_of(model):
                found[device] = found.get(device, 0.0) + share
    return found


def share_of_others(model: ModelView, busy: Mapping[str, float]) -> float:
    """Returns the largest part of the time that other models compute on one of its devices.

    Args:
        busy: Result of `shares`.
    """
    own = busy_share(model)
    return max([0.0, *(busy.get(device, 0.0) - own for device in devices_of(model))])


def changes(view: ClusterView) -> list[tuple[ModelView, list[int]]]:
    """Returns the models whose degree should change, the latest first, and the degrees for each.

    The best degree comes first. Models with several copies are left out.
    """
    copies = Counter(model.name for model in view.models)
    busy = shares(view.models)
    found: list[tuple[float, ModelView, list[int]]] = []
    for model in view.models:
        if not _is_known(model) or model.state != "active" or copies[model.name] > 1:
            continue
        others = share_of_others(model, busy)
        if better := higher(model, others):
            found.append((-lateness(model, model.tp, others), model, better))
        elif (enough := lower(model, others)) is not None:
            found.append((0.0, model, [enough]))
    return [(model, chosen) for _, model, chosen in sorted(found, key=lambda each: each[0])]


def adjust(
    builder: PlanBuilder, wanted: Sequence[tuple[ModelView, list[int]]], make_room: MakeRoom
) -> None:
    """Moves at most one model to devices where its degree is another one.

    Evicts idle models for a higher degree; a later plan moves the model. The old copy serves until
    the new one is active, so they share no device.

    Args:
        wanted: Result of `changes`.
    """
    for model, chosen in wanted:
        if model.owes_s > 0 or model.pinned_device or builder.is_changing(model.name):
            continue
        if any(_move(builder, model, tp) for tp in chosen):
            return
        bins = _candidates(builder, model)
        if any(tp > model.tp and make_room(builder, _part(model, tp), bins) for tp in chosen):
            return


def _part(model: ModelView, tp: int) -> ModelView:
    return part(at_degree(model, tp))


def _candidates(builder: PlanBuilder, model: ModelView) -> list[Bin]:
    excluded = builder.changing().union(devices_of(model))
    return [b for b in builder.bins.values() if b.name not in excluded]


def _move(builder: PlanBuilder, model: ModelView, tp: int) -> bool:
    there = _part(model, tp)
    need = need_bytes(there)
    free = {b.name: b for b in _candidates(builder, model) if b.gpu.free_bytes >= need}
    home = kvpr.choose_devices(there, free, kvpr.by_rank, 0.0)
    if home is None:
        return False
    latency = "too late" if tp > model.tp else "early enough"
    reason = f"P99 latency is {latency} at tp {model.tp}, tp {tp} is chosen"
    migrate(builder, part(model), home, reason, there)
    return True
