"""Prism without one of its two schedulers (§7.4, Figures 10 and 11). Pure functions."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from prism.policies import prism
from prism.policies.admission import fcfs
from prism.policies.data import Action, ClusterView, Settings


def by_free_memory(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Plans like Prism without its global scheduler.

    The view has neither token rates nor measured speeds, so no device is under pressure: models are
    placed where most memory is free, and not moved for balance. Idle models are evicted for models
    whose requests wait.
    """
    models = tuple(structs.replace(m, token_rate=0.0, degrees={}) for m in view.models)
    return prism.plan(replace(view, models=models), settings)


FREE_MEMORY = replace(prism.POLICY, name="prism-free-memory", plan=by_free_memory)
"""Prism without its global scheduler. The paper does not describe the placement that is left."""
FCFS = replace(prism.POLICY, name="prism-fcfs", order=fcfs.order)
"""Prism without its local scheduler: requests of a device start in order of arrival."""
