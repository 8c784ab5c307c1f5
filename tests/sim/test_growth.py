"""The work of a simulation grows with its requests, not with tokens or with the square of anything:
counted in events and in looks at the cluster, since times depend on the machine."""

from __future__ import annotations

from typing import Any

import pytest

from prism_sim.cluster.view import Viewer
from prism_sim.cluster.world import World
from tests.sim.clusters import cluster, model, request, work


def simulated(size: int, policy: str = "prism", output: int = 100, seconds: float = 100.0) -> World:
    """Simulates `size` GPUs with two models and 100 requests each."""
    names = [f"m{i}" for i in range(2 * size)]
    setup = cluster([model(i, name) for i, name in enumerate(names)], size, policy=policy)
    many = [
        request(
            seconds * i / (100 * size), names[i * 7 % len(names)], 50 + i % 100, output + i % 50
        )
        for i in range(100 * size)
    ]
    world = World(setup, work(setup, many))
    world.run()
    assert not world.records.errors
    return world


@pytest.mark.parametrize("policy", ["prism", "static"])
def test_events_grow_with_requests(policy: str) -> None:
    events = {size: simulated(size, policy).records.events for size in (2, 8)}
    assert events[8] <= 4.2 * events[2]
    assert events[8] <= 10 * 800


def test_events_do_not_grow_with_tokens() -> None:
    """Runs at so low a rate that requests do not overlap."""
    short, long = (simulated(2, "static", output, 1000.0).records.events for output in (50, 400))
    assert long <= 1.1 * short


@pytest.mark.parametrize(("policy", "most"), [("prism", 30), ("static", 5)])
def test_quiet_clusters_are_seldom_looked_at(
    monkeypatch: pytest.MonkeyPatch, policy: str, most: int
) -> None:
    looks = 0
    models = Viewer.models

    def counted(self: Viewer, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return models(self, *args)

    monkeypatch.setattr(Viewer, "models", counted)
    simulated(4, policy)
    assert looks <= most
