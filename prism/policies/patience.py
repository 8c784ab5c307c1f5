"""How long a plan of the prism policy holds if nothing but time passes."""

from __future__ import annotations

import math

from prism.policies import replicas
from prism.policies.data import ClusterView, ModelView, Settings

A_MOMENT_S = 0.001
"""Idle times have to exceed their bounds, and a look must not come at the same time again."""


def patience_s(view: ClusterView, settings: Settings) -> float:
    """Until a model has been idle or up for long enough to make way for one that asks for a place,
    or a queue has lasted for long enough to be worth a copy; where one is worth it and finds no
    room, until rates may have changed. Seconds, or infinity."""
    moments = [replicas.saturated_in_s(m, settings) for m in replicas.queued(view)]
    crowded = any(moment <= 0 for moment in moments)
    if crowded:
        moments.append(replicas.RATE_LOOK_S)
    if crowded or any(m.state == "absent" and (m.waiting or m.never_evict) for m in view.models):
        for model in view.models:
            moments += _evictable_in_s(model, settings)
    return max(A_MOMENT_S, min((moment for moment in moments if moment > 0), default=math.inf))


def _evictable_in_s(model: ModelView, settings: Settings) -> list[float]:
    """Until it has been up, and idle, for long enough to be evicted. What is over at that moment is
    over by far more than rounding: a look that comes too early by that is followed by another."""
    if model.state != "active":
        return []
    left = [model.owes_s] if model.owes_s > 0 else []
    if not (model.never_evict or model.running or model.waiting):
        left += [settings.min_idle_s - model.idle_s, settings.idle_threshold_s - model.idle_s]
    return [seconds + A_MOMENT_S for seconds in left if seconds > -A_MOMENT_S / 2]
