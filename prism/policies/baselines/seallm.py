"""SeaLLM's placement and replacement interval (SeaLLM §4.1, §4.3; Algorithm 1, equations 6, 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prism.policies.baselines import doubling_budget, groups
from prism.policies.baselines.groups import Group, Step
from prism.policies.baselines.mux_placement import Mesh
from prism.policies.multiplexing.kv_blocks import KvBlocks
from prism.policies.placement import (
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
    StepTimes,
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

BATCH = 8
"""Batch size of the profiled steps, as in the paper's Figure 3."""


@dataclass(frozen=True, slots=True)
class SeallmSettings:
    """Parameters of the search. The defaults are those of §6.1."""

    # Weight of the normalised latency in the unserved index (equation 6).
    alpha: float = 0.0001
    # Services per sharing group. More are allowed if there are too few groups to place all services
    # (equation 3). §6.1 shares at most two because of its GPUs' memory.
    services_max: int = 2


SHIPPED = SeallmSettings()


def search(problem: Problem, settings: SeallmSettings = SHIPPED) -> Placement:
    """Returns the best simulated placement (`_rank`) of Algorithm 1.

    For each parallel size it allocates services to groups of that size by unserved index.
    REQUIRES: `problem.simulate`, with doubling-budget scheduling.
    """
    found: list[Step] = []
    for size in groups.degrees(problem):
        made = group_partition(problem, size)
        services_max = max(settings.services_max, -(-len(problem.models) // max(1, len(made))))
        steps = [*_allocated(problem, made, settings.alpha, services_max)]
        found.append(max(reversed(steps), key=_rank))  # of equal ones the one with most replicas
    if not found:
        return groups.as_placement((), problem.models)
    placement, outcome = max(found, key=_rank)
    return Placement(placement.units, placement.refused, outcome.attainment)


def _rank(simulated: Step) -> tuple[int, float, float]:
    """Returns the rank: most placed services (equation 3), attainment, least normalised latency.

    Lines 21-25. The paper compares only the last step of each size. Here all steps are compared,
    since the last replica may make the result worse.
    """
    placement, outcome = simulated
    return -len(placement.refused), *outcome.rank


def _allocated(
    problem: Problem, made: Sequence[Group], alpha: float, services_max: int
) -> Iterator[Step]:
    """Allocates services until no group can take another (second stage, lines 8-18)."""

    def index(outcome: PlacementOutcome, service: str) -> float:
        return unserved_index(outcome, service, alpha)

    kv_bytes = {m.name: expected_kv_bytes(m, problem.times) for m in problem.models}
    simulate = groups.simulation(made, problem)
    return groups.allocate(
        made, problem.models, simulate, index, models_max=services_max, kv_bytes=kv_bytes
    )


def expected_kv_bytes(service: ModelSpecView, times: StepTimes | None) -> int:
    """Returns the expected KV memory of a service, which an allocation must fit (§4.1).

    It is that of the mean number of running requests (rate x execution time in a batch of BATCH),
    each at full length.
    """
    if times is None:
        return 0
    tokens = service.prompt_tokens + service.output_tokens
    tp = min(service.tp_degrees)
    prefill_s = times.prefill_s(service.name, tp, 1, service.prompt_tokens, 1.0)
    decode_s = times.decode_s(service.name, tp, BATCH, tokens, 1.0)
    running = service.rate_rps * (prefill_s + service.output_tokens * decode_s)
    return int(max(1.0, running) * tokens * service.token_bytes)


def unserved_index(outcome: PlacementOutcome, service: str, alpha: float) -> float:
    """Returns equation 6: requests that miss their SLO plus weighted normalised latency."""
    return outcome.unserved.get(service, 0) + alpha * outcome.normalized_latency.get(service, 0.0)


# --- groups --------------------------------------------------------------------------------


def group_partition(problem: Problem, size: int) -> list[Group]:
    """Returns groups of one size, some merged if services are too large for that size.

    Two groups at a time are merged until a trial allocation places these services (§4.1, second
    heuristic).
    """
    made = groups.uniform_groups(problem.devices, size)
    large = [m for m in problem.models if not _fits_alone(made, m)]
    while True:
        smallest_first = sorted(made, key=lambda g: g.mesh.size)
        unplaced = groups.first_unplaced([Group(g.mesh) for g in smallest_first], large)
        if unplaced is None or not _merge(made, unplaced):
            return made


def _fits_alone(made: Sequence[Group], model: ModelSpecView) -> bool:
    return any(Group(g.mesh).can_allocate(model, 1) for g in made)


def _merge(made: list[Group], model: ModelSpecView) -> bool:
    """Merges the two smallest neighbours of a usable total size. Returns False without any."""
    pairs = sorted(_neighbours(made), key=lambda pair: (made[pair].mesh.size, pair))
    for i in pairs:
        merged = Mesh(
            made[i].mesh.devices + made[i + 1].mesh.devices,
            min(made[i].mesh.capacity_bytes, made[i + 1].mesh.capacity_bytes),
            made[i].mesh.node,
            min(made[i].mesh.models_max, made[i + 1].mesh.models_max),
        )
        if merged.size <= max(model.tp_degrees):
            made[i : i + 2] = [Group(merged)]
            return True
    return False


def _neighbours(made: Sequence[Group]) -> Iterator[int]:
    """Yields the indices of groups that are followed by one of the same size and node."""
    for i, (left, right) in enumerate(pairwise(made)):
        if left.mesh.size == right.mesh.size and left.mesh.node == right.mesh.node:
            yield i


# --- replacement ---------------------------------------------------------------------------


def next_interval(last_s: float, real: float, estimated: float, beta: float = 0.1) -> float:
    """Returns the next replacement interval (equation 8).

    It is shorter if the estimate's relative error exceeds `beta`, longer if the error is below, and
    the same if it is equal.
    """
    error = abs(real - estimated)
    if error == beta * abs(estimated) and estimated != 0:
        return last_s
    return last_s * (1 - beta if error > beta * abs(estimated) else 1 + beta)


POLICY = Policy(
    "seallm",
    target.plan,
    frozenset({ADMISSION_ORDER, STEP_CONTROL, UNIFIED_KV, PLACEMENT_SEARCH}),
    evicts=False,
    is_balanced=always_balanced,
    search=search,
    simulates=True,
    next_interval=next_interval,
    steps=doubling_budget.control(),
    kv_blocks=KvBlocks.MERGED,
)
