"""SeaLLM's placement and replacement interval (SeaLLM §4.1, §4.3; Algorithm 1, equations 6, 8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prism.policies.baselines import groups
from prism.policies.baselines.groups import Group, Step
from prism.policies.baselines.mux_placement import Mesh
from prism.policies.placement import (
    ModelSpecView,
    Placement,
    PlacementOutcome,
    Problem,
    StepTimes,
)

BATCH = 8
"""Of the profiled steps, as in the paper's Figure 3."""


@dataclass(frozen=True, slots=True)
class SeallmSettings:
    """The defaults are those of §6.1."""

    # Weight of the normalised latency in the unserved index (equation 6).
    alpha: float = 0.0001
    # Services per sharing group; more where a partition has too few groups for all services, since
    # each must have a home (equation 3): §6.1 shares at most two because of its GPUs' memory.
    services_max: int = 2


SHIPPED = SeallmSettings()


def search(problem: Problem, settings: SeallmSettings = SHIPPED) -> Placement:
    """Algorithm 1: for each parallel size, all groups of that size, services allocated by unserved
    index; of all that was simulated the best (`_rank`). REQUIRES: `problem.simulate`, with the
    doubling-budget scheduling."""
    found: list[Step] = []
    for size in groups.degrees(problem):
        made = group_partition(problem, size)
        services_max = max(settings.services_max, -(-len(problem.models) // max(1, len(made))))
        steps = [*_allocated(problem, made, settings.alpha, services_max)]
        found.append(max(reversed(steps), key=_rank))  # of equal ones that with most replicas
    if not found:
        return groups.as_placement((), problem.models)
    placement, outcome = max(found, key=_rank)
    return Placement(placement.units, placement.refused, outcome.attainment)


def _rank(simulated: Step) -> tuple[int, float, float]:
    """Most services with a home (equation 3: all must have one), then the best attainment, then the
    least normalised latency (lines 21-25). The paper compares what each size ends with; a last
    replica may have made that worse than a step before it, which was simulated as well."""
    placement, outcome = simulated
    return -len(placement.refused), outcome.attainment, -outcome.mean_normalized_latency


def _allocated(
    problem: Problem, made: Sequence[Group], alpha: float, services_max: int
) -> Iterator[Step]:
    """The second stage, step by step, until no group can take another service (lines 8-18)."""

    def index(outcome: PlacementOutcome, service: str) -> float:
        return unserved_index(outcome, service, alpha)

    kv_bytes = {m.name: expected_kv_bytes(m, problem.times) for m in problem.models}
    play = groups.player(made, problem)
    return groups.allocate(
        made, problem.models, play, index, models_max=services_max, kv_bytes=kv_bytes
    )


def expected_kv_bytes(service: ModelSpecView, times: StepTimes | None) -> int:
    """The profiled memory usage that an allocation is checked against (§4.1): the requests that are
    in the system on average (rate x execution time in a batch of BATCH), each at full length."""
    if times is None:
        return 0
    tokens = service.prompt_tokens + service.output_tokens
    tp = min(service.tp_degrees)
    prefill_s = times.prefill_s(service.name, tp, 1, service.prompt_tokens, 1.0)
    decode_s = times.decode_s(service.name, tp, BATCH, tokens, 1.0)
    running = service.rate_rps * (prefill_s + service.output_tokens * decode_s)
    return int(max(1.0, running) * tokens * service.token_bytes)


def unserved_index(outcome: PlacementOutcome, service: str, alpha: float) -> float:
    """Equation 6: requests that miss their SLO, then the normalised latency."""
    return outcome.unserved.get(service, 0) + alpha * outcome.normalized_latency.get(service, 0.0)


# --- groups --------------------------------------------------------------------------------


def group_partition(problem: Problem, size: int) -> list[Group]:
    """Groups of one size; where that is too small for some services, two groups are merged, again
    and again, until those find a place in a trial allocation (§4.1, the second heuristic)."""
    made = groups.uniform_groups(problem.devices, size)
    large = [m for m in problem.models if not _fits_alone(made, m)]
    while True:
        smallest_first = sorted(made, key=lambda g: g.mesh.size)
        homeless = groups.first_homeless([Group(g.mesh) for g in smallest_first], large)
        if homeless is None or not _merge(made, homeless):
            return made


def _fits_alone(made: Sequence[Group], model: ModelSpecView) -> bool:
    return any(Group(g.mesh).can_allocate(model, 1) for g in made)


def _merge(made: list[Group], model: ModelSpecView) -> bool:
    """Merge the two smallest neighbours that make a group of a size the model can use."""
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
    """Indices of groups that are followed by one of the same size and node."""
    for i, (left, right) in enumerate(pairwise(made)):
        if left.mesh.size == right.mesh.size and left.mesh.node == right.mesh.node:
            yield i


# --- replacement ---------------------------------------------------------------------------


def next_interval(last_s: float, real: float, estimated: float, beta: float = 0.1) -> float:
    """Equation 8: shorter where the estimate was off by more than `beta` of itself, else longer; an
    error of exactly `beta` changes nothing."""
    error = abs(real - estimated)
    if error == beta * abs(estimated) and estimated != 0:
        return last_s
    return last_s * (1 - beta if error > beta * abs(estimated) else 1 + beta)
