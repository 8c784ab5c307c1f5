"""Tensor-parallel degrees of the prism policy: the least one that meets the SLOs.

In the papers the degree of a model is given. Here a model may name degrees, of which the policy
chooses by the model's traffic. Latencies are computed for the busiest interval of the traffic, on
devices that other models keep busy for a part of the time.
"""

from __future__ import annotations

import math

from msgspec import structs

from prism.policies.data import ModelView
from prism.policies.latency import MEETS, is_known, lateness

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


def higher(model: ModelView, others: float) -> list[int]:
    """Returns the degrees to raise the model to, best first; empty if its own is enough.

    Those that meet the SLOs come first, the least of them at the front, then the least late.
    """
    if not _may_change(model) or (now := lateness(model, model.tp, others)) <= 1.0:
        return []
    found = [
        (max(MEETS, late), tp)
        for tp in model.degrees
        if tp > model.tp and (late := lateness(model, tp, others)) < min(BETTER * now, math.inf)
    ]
    return [tp for _, tp in sorted(found)]


def lower(model: ModelView, others: float) -> int | None:
    """Returns the least degree that is enough with a wide margin, below the present one."""
    if not _may_change(model):
        return None
    below = (tp for tp in sorted(model.degrees) if tp < model.tp)
    return next((tp for tp in below if lateness(model, tp, others) <= LOWERS), None)


def to_activate(model: ModelView) -> ModelView:
    """Returns an absent model at the degree that its traffic needs, or else at the least one."""
    better = higher(model, 0.0) if model.pinned_device is None else []
    return at_degree(model, better[0]) if better else model


def _may_change(model: ModelView) -> bool:
    return len(model.degrees) > 1 and is_known(model)
