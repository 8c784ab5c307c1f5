"""Allocation of models to GPU groups one by one, guided by simulations.

Shared by AlpaServe's fast greedy selection (AlpaServe §4.2) and SeaLLM's service allocation
(SeaLLM Algorithm 1).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from prism.policies.baselines.mux_placement import Mesh, mesh_groups
from prism.policies.placement import (
    DeviceSpecView,
    Hosted,
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
    Unit,
    by_node,
)


@dataclass(slots=True)
class Group:
    """Mesh with the models allocated to it."""

    mesh: Mesh
    models: list[ModelSpecView] = field(default_factory=list)

    def can_allocate(self, model: ModelSpecView, models_max: int) -> bool:
        """Returns True if the model can be added: count, TP degree, weights and KV floors fit."""
        if model in self.models or len(self.models) >= min(models_max, self.mesh.models_max):
            return False
        if self.mesh.size not in model.tp_degrees:
            return False
        return self._holds([*self.models, model], {})

    def has_room(self, model: ModelSpecView, kv_bytes: Mapping[str, int]) -> bool:
        """Returns True if all models fit with the KV memory that they are expected to use."""
        return self._holds([*self.models, model], kv_bytes)

    def _holds(self, models: Sequence[ModelSpecView], kv_bytes: Mapping[str, int]) -> bool:
        kv = {m.name: max(m.kv_floor_bytes, kv_bytes.get(m.name, 0)) for m in models}
        need = sum(m.part_bytes(self.mesh.size, kv[m.name]) for m in models)
        return need <= self.mesh.capacity_bytes


def as_placement(groups: Sequence[Group], models: Sequence[ModelSpecView]) -> Placement:
    units = tuple(Unit(g.mesh.devices, tuple(Hosted(m.name) for m in g.models)) for g in groups)
    placed = {m.name for g in groups for m in g.models}
    refused = {m.name: "no GPU group has room for it" for m in models if m.name not in placed}
    return Placement(units, refused)


Step = tuple[Placement, PlacementOutcome]


def simulation(groups: Sequence[Group], problem: Problem) -> Callable[[], Step]:
    """Returns a function that simulates the current allocation of the groups.

    REQUIRES: `problem.simulate`.
    """
    simulate = problem.simulate
    assert simulate is not None, "the search needs a simulator"

    def run() -> Step:
        placement = as_placement(groups, problem.models)
        return placement, simulate(placement)

    return run


def rates(groups: Sequence[Group]) -> dict[int, float]:
    """Returns the requests per second of each group by index, divided among replicas."""
    replicas = Counter(model.name for group in groups for model in group.models)
    return {
        index: sum(m.rate_rps / replicas[m.name] for m in group.models)
        for index, group in enumerate(groups)
    }


def by_rate(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups sorted by request rate, then by number of models."""
    rate = rates(groups)
    order = sorted(range(len(groups)), key=lambda i: (rate[i], len(groups[i].models), i))
    return [groups[i] for i in order]


def uniform_groups(devices: Sequence[DeviceSpecView], size: int) -> list[Group]:
    """Divides every node into groups of `size`. The rest of a node stays unused."""
    meshes = next(mesh_groups(devices, (size,)))
    return [Group(mesh) for mesh in meshes]


def degrees(problem: Problem) -> list[int]:
    """Returns the powers of two up to the largest node that some model supports (SeaLLM §4.1)."""
    most = max((len(node) for node in by_node(problem.devices)), default=0)
    supported = {tp for m in problem.models for tp in m.tp_degrees}
    return [tp for tp in sorted(supported) if tp <= most and tp & (tp - 1) == 0]


def allocate(
    groups: Sequence[Group],
    models: Sequence[ModelSpecView],
    simulate: Callable[[], Step],
    index: Callable[[PlacementOutcome, str], float],
    *,
    models_max: int = sys.maxsize,
    kv_bytes: Mapping[str, int] | None = None,
) -> Iterator[Step]:
    """Yields the current placement with its simulation, then adds one model, until none fits.

    The group is the one with the lowest request rate that can hold any model. The model is the one
    with the largest `index` that fits there. Replicas are added once every model is placed.

    Args:
        simulate: Simulates the current allocation.
        index: Returns the priority of a model after a simulation.
        kv_bytes: Expected KV use of models. A replica is added only if all models' use fits.
    """
    while True:
        placement, outcome = simulate()
        yield placement, outcome
        scores: Mapping[str, float] = {m.name: index(outcome, m.name) for m in models}
        ranked = sorted(models, key=lambda m: -scores[m.name])
        found = _next(by_rate(groups), ranked, models_max, kv_bytes or {})
        if found is None:
            return
        found[0].models.append(found[1])


def _next(
    groups: Sequence[Group],
    models: Sequence[ModelSpecView],
    models_max: int,
    kv_bytes: Mapping[str, int],
) -> tuple[Group, ModelSpecView] | None:
    """Returns the next group and model, models that are not placed before replicas.

    Prefers a group that leaves room for all other models that are not placed.
    """
    placed = {m.name for group in groups for m in group.models}
    unplaced = [m for m in models if m.name not in placed]
    fitting = [
        (group, model)
        for group, model in product(groups, unplaced)
        if group.can_allocate(model, models_max)
    ]
    for group, model in fitting:
        rest = [m for m in unplaced if m is not model]
        trial = [Group(g.mesh, [*g.models, *([model] * (g is group))]) for g in groups]
        if first_unplaced(trial, rest) is None:
            return group, model
    if fitting:
        return fitting[0]
    replicas = (m for m in models if m.name in placed and may_have_replica(groups, m))
    for group, model in product(groups, [*replicas]):
        if group.can_allocate(model, models_max) and group.has_room(model, kv_bytes):
            return group, model
    return None


def may_have_replica(groups: Sequence[Group], model: ModelSpecView) -> bool:
    """Returns True if the model has fewer copies in the groups than it may have."""
    return sum(model in group.models for group in groups) < model.replicas_max


def first_unplaced(trial: Sequence[Group], models: Sequence[ModelSpecView]) -> ModelSpecView | None:
    """Fills `trial` by first fit, decreasing size. Returns the first model that does not fit."""
    for model in sorted(models, key=lambda m: -m.weight_bytes):
        group = next((g for g in trial if g.can_allocate(model, sys.maxsize)), None)
        if group is None:
            return model
        group.models.append(model)
    return None
