"""AlpaServe (OSDI 2023): models placed on GPU groups by a simulator-guided search, temporal sharing
first come, first served within a group.

§4.2: Algorithm 2 enumerates how models fall into buckets of like size, how many devices each
bucket gets, and the groups of equal size these form; Algorithm 1 selects the replicas greedily by
SLO attainment. With few models and groups every extension is simulated (Algorithm 1, beam size 1);
with more, the faster variant of §4.2 is used: one simulation a round, then the model with most
unserved requests goes to the least used group that has room. As in the papers that compare against
it (MuxServe §4.1, SeaLLM §6.1), groups use tensor parallelism and requests are batched
continuously, with KV memory shared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from prism.policies.baselines import groups
from prism.policies.baselines.groups import Group, Step
from prism.policies.baselines.mux_placement import computation
from prism.policies.placement import (
    DeviceSpecView,
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
)

SIZE_RATIO_MAX = 4.0
"""Models in one bucket differ in size by no more, since a small one would wait too long behind a
large one (§4.2, convoy effect)."""
PAIRS_MAX = 24
"""Models x groups up to which every extension is simulated."""


def search(problem: Problem) -> Placement:
    """The placement with the highest simulated attainment. REQUIRES: `problem.simulate`.

    Equal attainments go by the more models that have a home, so that one whose requests would be
    late is not left out, then by the lower normalised latency and the fewer devices per group.
    """
    best: tuple[tuple[float, int, float], Placement] | None = None
    for made in _candidates(problem):
        for placement, outcome in made:
            attainment, latency = _rank(outcome)
            rank = (attainment, _housed(placement), latency)
            if best is None or rank > best[0]:
                best = (rank, placement)
    if best is None:  # no device, or none of the degrees fits into a node
        return groups.as_placement((), problem.models)
    return Placement(best[1].units, best[1].refused, best[0][0])


def _candidates(problem: Problem) -> Iterator[Iterator[Step]]:
    """Greedy selections for each division into buckets and each group size per bucket."""
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
    """Bucket after bucket, the groups of the others as they are."""
    every = [group for _, meshes in made for group in meshes]
    play = groups.player(every, problem)
    for bucket, meshes in made:
        if len(problem.models) * len(every) <= PAIRS_MAX:
            yield from _by_trying_each(bucket, meshes, play)
        else:
            yield from groups.allocate(meshes, bucket, play, _unserved)


def _by_trying_each(
    bucket: Sequence[ModelSpecView], meshes: Sequence[Group], play: Callable[[], Step]
) -> Iterator[Step]:
    """Algorithm 1: of all models that fit into any group, add the one that simulates best."""
    yield play()
    while True:
        best: tuple[tuple[float, float], Step, Group, ModelSpecView] | None = None
        for group, model in product(meshes, bucket):
            if group.can_allocate(model, sys.maxsize):
                group.models.append(model)
                step = play()
                group.models.pop()
                if best is None or _rank(step[1]) > best[0]:
                    best = (_rank(step[1]), step, group, model)
        if best is None:
            return
        best[2].models.append(best[3])
        yield best[1]


def _rank(outcome: PlacementOutcome) -> tuple[float, float]:
    return (outcome.attainment, -outcome.mean_normalized_latency)


def _housed(placement: Placement) -> int:
    return len({hosted.model for unit in placement.units for hosted in unit.models})


def _unserved(outcome: PlacementOutcome, model: str) -> float:
    return outcome.unserved.get(model, 0)


# --- buckets -------------------------------------------------------------------------------


def bucketings(models: Sequence[ModelSpecView]) -> list[list[list[ModelSpecView]]]:
    """Divisions into buckets of like size: one bucket if sizes allow it, and one bucket per run of
    sizes that differ by at most SIZE_RATIO_MAX."""
    ordered = sorted(models, key=lambda m: (m.weight_bytes, m.name))
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
    """Devices for each bucket in proportion to its computation, but enough for its weights; None if
    there are too few for that. Whole nodes stay together as far as that goes."""
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
    """`spare` in proportion to computation, largest remainders first."""
    work = [sum(computation(m) for m in bucket) for bucket in buckets]
    total = sum(work)
    exact = [spare * w / total if total > 0 else spare / len(work) for w in work]
    whole = [int(e) for e in exact]
    by_rest = sorted(range(len(work)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_rest[: spare - sum(whole)]:
        whole[i] += 1
    return whole
