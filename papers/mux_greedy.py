"""The placement that MuxServe's is compared with (MuxServe §4.4, Figure 8): models by arrival rate,
each to the mesh with the most free memory. Mesh groups are those of MuxServe's own search, and the
best of them by its estimator is taken, so that only the assignment differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prism.policies.baselines.mux_placement import MeshUnit, Planner, best_of, kv_bytes, mesh_groups
from prism.policies.placement import ModelSpecView, Placement, Problem


class GreedyPlanner(Planner):
    """Options are ranked by free memory instead of the gain in throughput."""

    def _options(
        self, model: ModelSpecView, units: Sequence[MeshUnit]
    ) -> Iterator[tuple[tuple[float, float], int, MeshUnit]]:
        for _, index, grown in super()._options(model, units):
            free = kv_bytes(units[index].mesh, units[index].models)
            yield (float(free or 0), -float(index)), index, grown


def search(problem: Problem) -> Placement:
    """REQUIRES: `problem.times`."""
    assert problem.times is not None, "the estimator needs step times"
    planner = GreedyPlanner(problem.models, problem.devices, problem.times)
    groups = list(mesh_groups(problem.devices, planner.degrees()))
    return planner.placement(best_of(planner, groups, lambda model: model.rate_rps))
