"""A tensor-parallel model is moved: both groups of ranks hold memory until the new one serves."""

from __future__ import annotations

import dataclasses

from prism.policies import registry
from prism.policies.data import Action, ClusterView, Migrate
from prism_sim.cluster.world import World
from tests.sim.clusters import cluster, model, request, work


def test_all_ranks_go_and_no_request_is_lost() -> None:
    setup = cluster([model(0, "a", tp=2)], 4, policy="prism")
    trace = work(setup, [request(0.2 * i, "a", 60, 30) for i in range(100)])
    plain = registry.get("prism")
    seen: list[ClusterView] = []

    def plan(view: ClusterView, settings: object) -> tuple[Action, ...]:
        seen.append(view)
        if view.now_s > 5 and ("active", "gpu:0") in [(m.state, m.device) for m in view.models]:
            return (Migrate("a", "gpu:0", "gpu:2", "test", peers=("gpu:3",)),)
        actions: tuple[Action, ...] = plain.plan(view, settings)
        return actions

    records = World(setup, trace, dataclasses.replace(plain, plan=plan, is_balanced=None)).run()
    assert not records.errors
    assert all(records.end_s)
    assert records.counts["migrate"] == 1
    last = seen[-1]
    assert (last.models[0].device, last.models[0].peers) == ("gpu:2", ("gpu:3",))
    assert [gpu.free_bytes for gpu in last.gpus[:2]] == [64 << 20, 64 << 20]
