"""How long a plan of the prism policy holds if nothing but time passes."""

from __future__ import annotations

import math

from prism.policies import replicas
from prism.policies.data import ClusterView, ModelView, Settings

A_MOMENT_S = 0.001
"""Idle times have to exceed their bounds."""


def patience_s(view: ClusterView, settings: Settings) -> float:
    """Until a model has been idle or up for long enough to make way for one that asks for a place,
    or a queue has lasted for long enough to be worth a copy."""
    bounds = [replicas.saturated_in_s(m, settings) for m in view.models if m.replicas_max > 1]
    crowded = any(bound <= 0 for bound in bounds)
    if crowded or any(m.state == "absent" and (m.waiting or m.never_evict) for m in view.models):
        bounds += [_evictable_in_s(m, settings) for m in view.models]
    return min((bound for bound in bounds if bound > 0), default=math.inf)


def _evictable_in_s(model: ModelView, settings: Settings) -> float:
    """Until the next of its idle times is reached; 0 if all are."""
    if model.state != "active" or model.never_evict or model.running or model.waiting:
        return 0.0
    bounds_s = (settings.min_idle_s, settings.idle_threshold_s)
    waits_s = [
        bound_s - model.idle_s + A_MOMENT_S for bound_s in bounds_s if model.idle_s <= bound_s
    ]
    return max(model.owes_s, min(waits_s, default=0.0))
