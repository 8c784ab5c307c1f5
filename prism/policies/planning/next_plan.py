"""Time until a plan of the prism policy may change if nothing but time passes."""

from __future__ import annotations

import math

from prism.policies.data import ClusterView, ModelView, Settings
from prism.policies.planning import model_copies

MARGIN_S = 0.001
"""Margin, since idle times must exceed their thresholds, and the next plan must be later."""


def next_plan_in_s(view: ClusterView, settings: Settings) -> float:
    """Returns the seconds until the plan may change, or infinity.

    The causes are: a model becomes evictable while another needs memory, or a queue has lasted long
    enough for another copy. If a copy is needed and has no room, rates may change as well.
    """
    moments = [model_copies.saturated_in_s(m, settings) for m in model_copies.queued(view)]
    saturated = any(moment <= 0 for moment in moments)
    if saturated:
        moments.append(model_copies.RATE_INTERVAL_S)
    if saturated or any(m.state == "absent" and (m.waiting or m.never_evict) for m in view.models):
        for model in view.models:
            moments += _evictable_in_s(model, settings)
    return max(MARGIN_S, min((moment for moment in moments if moment > 0), default=math.inf))


def _evictable_in_s(model: ModelView, settings: Settings) -> list[float]:
    """Returns the times until the model has been active, and idle, long enough to be evicted.

    The margin is far larger than rounding errors. If a plan is still too early by rounding, another
    one follows.
    """
    if model.state != "active":
        return []
    left = [model.owes_s] if model.owes_s > 0 else []
    if not (model.never_evict or model.running or model.waiting):
        left += [settings.min_idle_s - model.idle_s, settings.idle_threshold_s - model.idle_s]
    return [seconds + MARGIN_S for seconds in left if seconds > -MARGIN_S / 2]
