"""Variants of policies with one part removed or replaced, for the papers' ablations.

Pure functions. Only `python -m lab.papers` uses the variants; users cannot select them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from lab.papers.ablations import mlfq, mux_planners, mux_published, round_robin
from prism.errors import ConfigError
from prism.policies import ablations, registry
from prism.policies.baselines import dedicated, mux_placement, temporal
from prism.policies.data import Action, ClusterView, Settings
from prism.policies.knobs import SHIPPED, Knobs, tuned
from prism.policies.placement import ModelSpecView, Placement, Problem, Search, Unit
from prism.policies.policy import Policy


def in_order(view: ClusterView, settings: Settings) -> tuple[Action, ...]:
    """Plans like prism-free-memory, with single-GPU models pinned in the order of the list.

    The first models are on the first GPU and so on, regardless of their load.
    """
    names, gpus = list(dict.fromkeys(m.name for m in view.models)), [g.name for g in view.gpus]
    home = {name: gpus[i * len(gpus) // len(names)] for i, name in enumerate(names)}
    models = tuple(structs.replace(m, pinned_device=home[m.name]) for m in view.models)
    return ablations.by_free_memory(replace(view, models=models), settings)


def partitioned(search: Search) -> Search:
    """Returns a search with the KV memory of each unit split equally between its models.

    MuxServe without its unified memory manager (MuxServe §4.4).
    """

    def found(problem: Problem) -> Placement:
        placement = search(problem)
        models = {m.name: m for m in problem.models}
        capacity = {d.name: d.capacity_bytes for d in problem.devices}
        return replace(
            placement, units=tuple(_partitioned(u, models, capacity) for u in placement.units)
        )

    return found


def _partitioned(
    unit: Unit, models: Mapping[str, ModelSpecView], capacity: Mapping[str, int]
) -> Unit:
    weights = sum(models[host.model].part_bytes(unit.tp) for host in unit.models)
    smallest = min(capacity[device] for device in unit.devices)
    limit_bytes = (smallest - weights) // max(1, len(unit.models))
    return replace(unit, models=tuple(replace(h, kv_limit_bytes=limit_bytes) for h in unit.models))


def changed(search: Search, change: Callable[[ModelSpecView, Problem], dict[str, Any]]) -> Search:
    """Returns a search in which `change` replaces some fields of each model."""

    def found(problem: Problem) -> Placement:
        models = tuple(replace(model, **change(model, problem)) for model in problem.models)
        return search(replace(problem, models=models))

    return found


def together(search: Search) -> Search:
    """Returns a search with all models on all devices as one unit (MuxServe §4.4, Figure 10)."""
    return changed(search, lambda model, problem: {"tp_degrees": (len(problem.devices),)})


def as_given(search: Search) -> Search:
    """Returns a search with every model at its configured TP degree."""
    return changed(search, lambda model, problem: {"tp_degrees": (model.tp,)})


ONE_UNIT: dict[str, Any] = {"search": together(mux_placement.search)}
OWN_KV: dict[str, Any] = {"search": partitioned(mux_placement.search), "kv_blocks": None}
Change = Callable[[Policy], Policy]
KnobsChange = Callable[[Knobs], Knobs]

VARIANTS: dict[tuple[str, str], Change] = {
    # Prism §7.4, Figure 10
    ("prism", "in-order"): lambda p: replace(p, plan=in_order),
    ("muxserve++", "given"): lambda p: replace(p, search=as_given(mux_placement.search)),
    ("muxserve++", "listed"): lambda p: replace(p, search=as_given(mux_planners.listed)),
    # MuxServe §4.4, Figures 8, 9 and 10
    ("muxserve", "greedy"): lambda p: replace(p, search=mux_planners.greedy),
    ("muxserve", "fcfs"): lambda p: replace(p, steps=temporal.FCFS),
    ("muxserve", "unit"): lambda p: replace(p, **ONE_UNIT),
    ("muxserve", "unit-fcfs"): lambda p: replace(p, steps=temporal.FCFS, **ONE_UNIT),
    ("muxserve", "unit-rr"): lambda p: replace(p, steps=round_robin.ROUND_ROBIN, **ONE_UNIT),
    ("muxserve", "own-kv"): lambda p: replace(p, **OWN_KV),
    ("muxserve", "temporal"): lambda p: replace(p, steps=temporal.FCFS, **OWN_KV),
    # MuxServe §4.3, Figure 7
    ("muxserve", "published"): lambda p: replace(p, search=mux_published.search("muxserve")),
    ("muxserve", "published-fcfs"): lambda p: replace(
        p, search=mux_published.search("temporal"), steps=temporal.FCFS
    ),
    ("dedicated", "published"): lambda p: replace(p, search=mux_published.search("spatial")),
    # SeaLLM §6.3, Figure 8
    ("seallm", "F"): lambda p: replace(p, steps=temporal.FCFS),
    ("seallm", "M"): lambda p: replace(p, steps=mlfq.control()),
    ("seallm", "P"): lambda p: replace(p, plan=dedicated.plan, search=dedicated.search, steps=None),
    ("seallm", "A"): lambda p: replace(p, next_interval=None),
}


KNOBS: dict[tuple[str, str], KnobsChange] = {
    ("qlm-first-idle", "by-deadline"): lambda k: replace(k, qlm=replace(k.qlm, by_deadline=True)),
    # SeaLLM §6.2: "a fixed percentage of computational resources for each LLM service"
    ("muxserve", "published"): lambda k: replace(k, adbs=mux_published.as_run(k.adbs)),
    ("muxserve", "fixed-sm"): lambda k: replace(k, adbs=replace(k.adbs, wider=False)),
}
"""Variants that differ from the policy in its knobs."""
NAMES = tuple(dict.fromkeys((*VARIANTS, *KNOBS)))


def get(policy: str, variant: str = "", knobs: Knobs = SHIPPED) -> Policy:
    """Returns a variant of a policy ("" for the policy itself), with `knobs` applied.

    Raises ConfigError.
    """
    whole, key = registry.get(policy), (policy, variant)
    if variant and key not in NAMES:
        known = ", ".join(v for name, v in NAMES if name == policy) or "none"
        raise ConfigError(f"variant {variant!r} of {policy!r} is not one of {known}")
    found = tuned(whole, KNOBS[key](knobs) if key in KNOBS else knobs)
    return VARIANTS[key](found) if key in VARIANTS else found
