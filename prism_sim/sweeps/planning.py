"""The fewest GPUs at which a policy meets its SLOs, by search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism_sim.sweeps.intervals import Interval
from prism_sim.sweeps.points import (
    Point,
    PointOutcome,
    SeedGroup,
    Store,
    in_processes,
    run_points,
    seeded,
    simulate,
)


class CapacityPlan(msgspec.Struct, frozen=True):
    """The result of one policy's search."""

    policy: str
    # The fewest found; None where even `most` are too few.
    gpus: int | None
    attainment: float
    target: float
    metric: str
    # GPUs -> attainment, the mean over seeds, in the order of trying. Every policy has the same
    # budget.
    tried: dict[int, float]
    # Of 95 % confidence intervals of these; empty for a single seed.
    half_widths: dict[int, float] = {}
    seeds: int = 1


class Search(msgspec.Struct, frozen=True):
    """One policy's search, which any process can do. points: the folder of outcomes, if any. seeds:
    each point is simulated with all of them; empty: with that of the file."""

    config: str
    changes: dict[str, Any]
    policy: str
    target: float
    metric: str
    most: int
    points: Path | None = None
    seeds: tuple[int, ...] = ()


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

    def simulated(gpus: int) -> list[PointOutcome]:
        changes = {**search.changes, "policy": search.policy, "gpus.count": gpus}
        points = [Point(search.config, changes | seed) for seed in seeded(search.seeds)]
        return run_points(points, simulate, jobs=1, store=store, progress=_silent)

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
    simulate: Callable[[int], Sequence[PointOutcome]],
) -> CapacityPlan:
    """Double until the target is met, then bisect between the last two. Attainment need not rise
    with every GPU; what is returned meets the target in the mean over seeds and one GPU less, as
    tried, does not. `simulate`: the outcomes on so many GPUs, one for each seed. At most
    2 log2(most) + 2 points."""
    tried: dict[int, Interval] = {}
    seeds = 1

    def meets(gpus: int) -> bool:
        nonlocal seeds
        if gpus not in tried:
            outcomes = simulate(gpus)
            seeds = len(outcomes)
            tried[gpus] = SeedGroup({}, outcomes).attainment(metric)
        return tried[gpus].mean >= target

    def plan(gpus: int | None, at: int) -> CapacityPlan:
        means = {g: found.mean for g, found in tried.items()}
        halves = {g: found.half_width for g, found in tried.items()} if seeds > 1 else {}
        return CapacityPlan(policy, gpus, means[at], target, metric, means, halves, seeds)

    low, high = 0, 1
    while not meets(high):
        if high >= most:
            return plan(None, high)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return plan(high, high)
