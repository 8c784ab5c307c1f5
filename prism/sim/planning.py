"""The fewest GPUs at which a policy meets its SLOs, by search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism.sim.points import Point, PointOutcome, Store, in_processes, run_points, simulate


class CapacityPlan(msgspec.Struct, frozen=True):
    """The result of one policy's search."""

    policy: str
    # The fewest found; None where even `most` are too few.
    gpus: int | None
    attainment: float
    target: float
    metric: str
    # GPUs -> attainment, in the order of trying. Every policy has the same budget.
    tried: dict[int, float]


class Search(msgspec.Struct, frozen=True):
    """One policy's search, which any process can do. points: the folder of outcomes, if any."""

    config: str
    changes: dict[str, Any]
    policy: str
    target: float
    metric: str
    most: int
    points: Path | None = None


def plans(
    searches: Sequence[Search], *, jobs: int, progress: Callable[[int, int], None]
) -> list[CapacityPlan]:
    """In the order of `searches`; jobs: processes, one search each at a time."""
    found: dict[int, CapacityPlan] = {}
    progress(0, len(searches))
    for index, made in in_processes(list(enumerate(searches)), plan_one, jobs):
        found[index] = made
        progress(len(found), len(searches))
    return [found[i] for i in range(len(searches))]


def plan_one(search: Search) -> CapacityPlan:
    store = Store(search.points, PointOutcome)

    def simulated(gpus: int) -> PointOutcome:
        changes = {**search.changes, "policy": search.policy, "gpus.count": gpus}
        point = Point(search.config, changes)
        return run_points([point], simulate, jobs=1, store=store, progress=_silent)[0]

    return fewest_gpus(
        search.policy,
        target=search.target,
        metric=search.metric,
        most=search.most,
        simulate=simulated,
    )


def _silent(done: int, total: int) -> None:
    """Searches are shown as a whole."""


def fewest_gpus(
    policy: str,
    *,
    target: float,
    metric: str,
    most: int,
    simulate: Callable[[int], PointOutcome],
) -> CapacityPlan:
    """Double until the target is met, then bisect between the last two. Attainment need not rise
    with every GPU; what is returned meets the target and one GPU less, as tried, does not.
    `simulate`: the outcome on so many GPUs. At most 2 log2(most) + 2 points."""
    tried: dict[int, float] = {}

    def meets(gpus: int) -> bool:
        if gpus not in tried:
            tried[gpus] = simulate(gpus).attainment(metric, "1")
        return tried[gpus] >= target

    low, high = 0, 1
    while not meets(high):
        if high >= most:
            return CapacityPlan(policy, None, tried[high], target, metric, tried)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return CapacityPlan(policy, high, tried[high], target, metric, tried)
