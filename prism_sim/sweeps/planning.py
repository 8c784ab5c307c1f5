"""Search for the fewest GPUs at which a policy meets its SLOs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prism_replay.intervals import Interval
from prism_replay.outcomes import METRICS, PointOutcome, SeedGroup
from prism_sim.sweeps.points import Point, Store, in_processes, run_points, seeded, simulate


class CapacityPlan(msgspec.Struct, frozen=True):
    """Result of the search for one policy."""

    policy: str
    # Fewest GPUs that meet the target; None if `most` GPUs are too few.
    gpus: int | None
    attainment: float
    target: float
    metric: str
    # GPUs -> attainment, the mean over seeds, in the order of trying. The budget is the same for
    # every policy.
    tried: dict[int, float]
    # GPUs -> half-width of the 95 % confidence interval; empty for a single seed.
    half_widths: dict[int, float] = {}
    seeds: int = 1
    # GPUs -> outcomes, one per seed.
    outcomes: dict[int, list[PointOutcome]] = {}


class Search(msgspec.Struct, frozen=True):
    """Search for one policy, which can run in any process."""

    config: str
    changes: dict[str, Any]
    policy: str
    target: float
    metric: str
    most: int
    # Folder of outcomes, if they are stored.
    points: Path | None = None
    # Seeds with which each point is simulated; empty: the seed of the file.
    seeds: tuple[int, ...] = ()
    # True if the tables of requests are stored in `points` too.
    tables: bool = False
    # True if each simulated number of GPUs is printed to stderr.
    says: bool = False


def plans(
    searches: Sequence[Search], *, jobs: int, progress: Callable[[int, int], None]
) -> list[CapacityPlan]:
    """Returns the plans in the order of `searches`. jobs: Number of processes."""
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
        tables = str(search.points) if search.tables else ""
        points = [
            Point(search.config, changes | seed, tables=tables) for seed in seeded(search.seeds)
        ]
        if search.says:
            print(f"{search.policy}: simulating {gpus_text(gpus)}", file=sys.stderr, flush=True)
        return run_points(points, simulate, jobs=1, store=store, progress=_silent)

    return fewest_gpus(
        search.policy,
        target=search.target,
        metric=search.metric,
        most=search.most,
        simulate=simulated,
    )


def gpus_text(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def plan_goal(plan: CapacityPlan) -> str:
    """Returns text such as "99.5 % of requests within their TTFT SLO"."""
    slos = "all their SLOs" if plan.metric == "all" else f"their {METRICS[plan.metric]} SLO"
    return f"{100 * plan.target:g} % of requests within {slos}"


def _silent(done: int, total: int) -> None:
    """Shows nothing: progress is shown per search."""


def fewest_gpus(
    policy: str,
    *,
    target: float,
    metric: str,
    most: int,
    simulate: Callable[[int], Sequence[PointOutcome]],
) -> CapacityPlan:
    """Returns the plan of one policy, after at most 2 log2(most) + 2 points.

    Doubles the number of GPUs until the target is met, then bisects between the last two numbers.
    The result meets the target in the mean over seeds, and one GPU less was tried and does not. As
    attainment may fall with an additional GPU, even fewer GPUs may meet the target.

    simulate: Returns the outcomes for a number of GPUs, one per seed.
    """
    tried: dict[int, Interval] = {}
    outcomes: dict[int, list[PointOutcome]] = {}

    def meets(gpus: int) -> bool:
        if gpus not in tried:
            outcomes[gpus] = list(simulate(gpus))
            tried[gpus] = SeedGroup({}, outcomes[gpus]).attainment(metric)
        return tried[gpus].mean >= target

    def plan(gpus: int | None, at: int) -> CapacityPlan:
        means = {g: found.mean for g, found in tried.items()}
        seeds = len(outcomes[at])
        halves = {g: found.half_width for g, found in tried.items()} if seeds > 1 else {}
        return CapacityPlan(policy, gpus, means[at], target, metric, means, halves, seeds, outcomes)

    low, high = 0, 1
    while not meets(high):
        if high >= most:
            return plan(None, high)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return plan(high, high)


def answers(plans: Sequence[CapacityPlan]) -> list[SeedGroup]:
    """Returns the group of each plan at its number of GPUs, or at the most that were tried."""
    at = {plan.policy: plan.gpus or max(plan.tried) for plan in plans}
    return [g for g in tried_groups(plans) if g.changes["gpus"] == at[g.changes["policy"]]]


def tried_groups(plans: Sequence[CapacityPlan]) -> list[SeedGroup]:
    """Returns a group for each policy and number of GPUs, in the order of the plans."""
    found = []
    for plan in plans:
        for gpus, outcomes in sorted(plan.outcomes.items()):
            at = {"policy": plan.policy, "gpus": gpus}
            seeds = [{"seed": o.changes["seed"]} if "seed" in o.changes else {} for o in outcomes]
            own = [
                msgspec.structs.replace(outcome, changes=at | seed)
                for outcome, seed in zip(outcomes, seeds, strict=True)
            ]
            found.append(SeedGroup(at, own))
    return found
