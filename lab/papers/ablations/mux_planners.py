"""Alternatives to MuxServe's placement of models on meshes.

The groups of meshes are those of MuxServe's own search. The best group by its estimator is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prism.policies.baselines.mux_placement import (
    Key,
    MeshUnit,
    Planner,
    best_of,
    computation,
    kv_bytes,
    mesh_groups,
)
from prism.policies.placement import ModelSpecView, Placement, Problem

Option = tuple[tuple[float, float], int, MeshUnit]


class GreedyPlanner(Planner):
    """Greedy baseline of MuxServe (§4.4, Figure 8).

    It places models by arrival rate, each on the mesh with the most free memory instead of the
    largest gain in throughput.
    """

    def _options(self, model: ModelSpecView, units: Sequence[MeshUnit]) -> Iterator[Option]:
        for _, index, grown in super()._options(model, units):
            free = kv_bytes(units[index].mesh, units[index].models)
            yield (float(free or 0), -float(index)), index, grown


class ListedPlanner(Planner):
    """Algorithm 1 as it is listed (MuxServe §3.2).

    Of meshes with equal gain, it takes the first one, not the one with the least strain.
    """

    def _options(self, model: ModelSpecView, units: Sequence[MeshUnit]) -> Iterator[Option]:
        for (gain, _), index, grown in super()._options(model, units):
            yield (gain, 0.0), index, grown


def greedy(problem: Problem) -> Placement:
    """Returns the placement of GreedyPlanner. REQUIRES: `problem.times`."""
    return _searched(GreedyPlanner, problem, lambda model: model.rate_rps)


def listed(problem: Problem) -> Placement:
    """Returns the placement of ListedPlanner. REQUIRES: `problem.times`."""
    return _searched(ListedPlanner, problem, computation)


def _searched(kind: type[Planner], problem: Problem, key: Key) -> Placement:
    assert problem.times is not None, "the estimator needs step times"
    planner = kind(problem.models, problem.devices, problem.times)
    groups = list(mesh_groups(problem.devices, planner.degrees()))
    return planner.placement(best_of(planner, groups, key))
