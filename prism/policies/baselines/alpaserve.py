"""AlpaServe (OSDI 2023): placement on GPU groups by a simulator-guided search, FCFS in each group.

Algorithm 2 (§4.2) enumerates the division of models into buckets of similar size, the number of
devices per bucket, and the size of the groups in each bucket. Algorithm 1 selects the replicas
greedily by SLO attainment. With few models and groups it simulates every extension (beam size 1).
With more, the faster variant of §4.2 simulates once per round and adds the model with the most
unserved requests to the least used group that has room. As in the papers that compare against it
(MuxServe §4.1, SeaLLM §6.1), groups use tensor parallelism, and requests are batched continuously
with shared KV memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from prism.policies.baselines import groups, temporal
from prism.policies.baselines.groups import Group, Step
from prism.policies.baselines.mux_placement import computation
from prism.policies.placement import (
    DeviceSpecView,
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
)
from prism.policies.planning import target
from prism.policies.policy import (
    ADMISSION_ORDER,
    PLACEMENT_SEARCH,
    STEP_CONTROL,
    UNIFIED_KV,
    Policy,
    always_balanced,
)

SIZE_RATIO_MAX = 4.0
"""Largest ratio of model sizes in a bucket: small models would wait for large ones too long (§4.2,
convoy effect)."""
PAIRS_MAX = 24
"""Models x groups up to which every extension is simulated."""


def search(problem: Problem) -> Placement:
    """Returns the placement with the highest simulated attainment. REQUIRES: `problem.simulate`.

    Ties are decided by more placed models, so that a model with late requests is not left out, then
    by lower normalised latency, then by fewer devices per group.
    """
    best: tuple[tuple[float, int, float], Placement] | None = None
    for made in _candidates(problem):
        for placement, outcome in made:
            attainment, latency = outcome.rank
            rank = (attainment, _placed(placement), latency)
            if best is None or rank > best[0]:
                best = (rank, placement)
    if best is None:  # without devices, or if no degree fits into a node
        return groups.as_placement((), problem.models)
    return Placement(best[1].units, best[1].refused, best[0][0])


def _candidates(problem: Problem) -> Iterator[Iterator[Step]]:
    """Yields the greedy selection for each division into buckets and group size per bucket."""
    sizes = groups.degrees(problem)
    for buckets in bucketings(problem.models):
        parts = split(buckets, problem.devices)
        if parts is None:
            continue
        for chosen in product(sizes, repeat=len(buckets)):
            made = [
                (bucket, groups.uniform_groups(part, size))
                for bucket, part, size in zip(buckets, parts, chosen, strict=True)
            ]
            yield _select(problem, made)


def _select(
    problem: Problem, made: Sequence[tuple[Sequence[ModelSpecView], list[Group]]]
) -> Iterator[Step]:
    """Fills the groups of one bucket after another. Yields each step."""
    every = [group for _, meshes in made for group in meshes]
    simulate = groups.simulation(every, problem)
    for bucket, meshes in made:
        if len(problem.models) * len(every) <= PAIRS_MAX:
            yield from _simulate_each(bucket, meshes, simulate)
        else:
            yield from groups.allocate(meshes, bucket, simulate, _unserved)


def _simulate_each(
    bucket: Sequence[ModelSpecView], meshes: Sequence[Group], simulate: Callable[[], Step]
) -> Iterator[Step]:
    """Adds the model and group with the best simulation, until none fits (Algorithm 1)."""
    yield simulate()
    while True:
        best: tuple[tuple[float, float], Step, Group, ModelSpecView] | None = None
        for group, model in product(meshes, bucket):
            more = groups.may_have_replica(meshes, model)
            if more and group.can_allocate(model, sys.maxsize):
                group.models.append(model)
                step = simulate()
                group.models.pop()
                if best is None or step[1].rank > best[0]:
                    best = (step[1].rank, step, group, model)
        if best is None:
            return
        best[2].models.append(best[3])
        yield best[1]


def _placed(placement: Placement) -> int:
    return len({hosted.model for unit in placement.units for hosted in unit.models})


def _unserved(outcome: PlacementOutcome, model: str) -> float:
    return outcome.unserved.get(model, 0)


# --- buckets -------------------------------------------------------------------------------


def bucketings(models: Sequence[ModelSpecView]) -> list[list[list[ModelSpecView]]]:
    """Returns divisions into buckets of similar size.

    They are a single bucket, and one bucket per run of sizes within SIZE_RATIO_MAX.
    """
    ordered = sorted(models, key=lambda m: m.weight_bytes)
    runs: list[list[ModelSpecView]] = []
    for model in ordered:
        if runs and model.weight_bytes <= SIZE_RATIO_MAX * runs[-1][0].weight_bytes:
            runs[-1].append(model)
        else:
            runs.append([model])
    return [runs] if len(runs) <= 1 else [[ordered], runs]


def split(
    buckets: Sequence[Sequence[ModelSpecView]], devices: Sequence[DeviceSpecView]
) -> list[list[DeviceSpecView]] | None:
    """Divides devices among buckets by computation, at least enough for each bucket's weights.

    Returns None if there are too few devices. Nodes are split as little as possible.
    """
    if len(buckets) == 1:
        return [sorted(devices, key=lambda d: (d.node, d.name))]
    capacity = min((d.capacity_bytes for d in devices), default=0)
    need = [_least_devices(bucket, capacity) for bucket in buckets]
    spare = len(devices) - sum(need)
    if spare < 0:
        return None
    counts = [n + extra for n, extra in zip(need, _shares(buckets, spare), strict=True)]
    ordered = sorted(devices, key=lambda d: (d.node, d.name))
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [ordered[start : start + n] for start, n in zip(starts, counts, strict=True)]


def _least_devices(bucket: Sequence[ModelSpecView], capacity_bytes: int) -> int:
    total = sum(m.part_bytes(1, m.kv_floor_bytes) for m in bucket)
    return -(-total // max(1, capacity_bytes))


def _shares(buckets: Sequence[Sequence[ModelSpecView]], spare: int) -> list[int]:
    """Divides `spare` in proportion to computation, by largest remainders."""
    work = [sum(computation(m) for m in bucket) for bucket in buckets]
    total = sum(work)
    exact = [spare * w / total if total > 0 else spare / len(work) for w in work]
    whole = [int(e) for e in exact]
    by_rest = sorted(range(len(work)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_rest[: spare - sum(whole)]:
        whole[i] += 1
    return whole


POLICY = Policy(
    "alpaserve",
    target.plan,
    frozenset({ADMISSION_ORDER, STEP_CONTROL, UNIFIED_KV, PLACEMENT_SEARCH}),
    evicts=False,
    is_balanced=always_balanced,
    search=search,
    simulates=True,
    steps=temporal.FCFS,
)
