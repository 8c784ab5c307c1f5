"""SeaLLM's scheduling of co-located services: doubling budgets (SeaLLM §4.2, Algorithm 2).

A request's first budget is the mean plus the standard deviation of its service's execution time.
When a budget is used up, one twice as large follows. The request with the least (left budget x mean
execution time of its service) is next, with all requests of its service and phase that fit. This is
shortest work first by the service's profile; requests that exceed it get lower priority. Preemptive
at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from prism.policies.baselines.temporal import WAIT, fitting, idle, kv_free_bytes
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepControl,
    StepJob,
    StepRequest,
)

Rank = tuple[float, float, float, str]
RankOf = Callable[[StepRequest], Rank]
"""Returns the rank of a request of one engine. The lowest is served first."""


@dataclass(frozen=True, slots=True)
class DbSettings:
    """Parameters that the paper does not specify."""

    # Waiting time, in initial budgets of its service, after which a request precedes all others,
    # longest waiting first. The paper has such a threshold per service without a value; its SLO is
    # five execution times.
    starvation_factor: float = 5.0
    # True: the best request's service prefills waiting requests before it decodes, as continuous
    # batching in the engine that SeaLLM extends (§5). False: Algorithm 2 literally, where a new
    # request waits until its service's decoding requests have ended or used up their budgets.
    join: bool = True


SHIPPED = DbSettings()


def control(settings: DbSettings = SHIPPED) -> StepControl:
    """Returns Algorithm 2 as step control. It is stateless: executed times define the budgets."""
    return StepControl(
        start=lambda view: None, choose=lambda view, state: (choose(view, settings), None)
    )


def budget_s(engine: EngineStepView) -> float:
    """Returns the first budget Q of the service's requests."""
    return engine.execution_s + engine.execution_std_s


def left_s(executed_s: float, first_s: float) -> float:
    """Returns the rest of the current budget: first_s, then 2, 4, 8... times that."""
    end_s, size_s = first_s, first_s
    while executed_s >= end_s * (1 - 1e-12):
        size_s *= 2
        end_s += size_s
    return end_s - executed_s


def priority(request: StepRequest, engine: EngineStepView) -> float:
    """Returns O_r; the smallest is first (§4.2, equation 7 with the budget as remaining time)."""
    return left_s(request.executed_s, budget_s(engine)) * engine.execution_s


def starvation_s(engine: EngineStepView, settings: DbSettings) -> float:
    return settings.starvation_factor * budget_s(engine)


class Head(NamedTuple):
    """Request that is served first, with its service and phase."""

    rank: Rank
    engine: EngineStepView
    phase: Phase
    request: StepRequest


def choose(view: DeviceStepView, settings: DbSettings) -> StepChoice:
    """Returns a step of the best request that can run, with its batch.

    Preempted requests keep their KV.
    """

    def rank(engine: EngineStepView) -> RankOf:
        return _rank(engine, settings)

    if not idle(view):
        return WAIT
    kv_free = kv_free_bytes(view)
    head = first(view, rank, kv_free)
    if head is None:
        return WAIT
    job = step(head, _phases(head, settings), rank(head.engine), kv_free)
    return StepChoice((job,), _holds_s(head, job, view, settings))


def _phases(head: Head, settings: DbSettings) -> tuple[Phase, ...]:
    """Returns the phases of the best request's service to try, in order of preference.

    A starved request always runs its own phase.
    """
    starved = head.rank[0] == -math.inf
    if not settings.join or starved or head.phase is Phase.PREFILL:
        return (head.phase,)
    return (Phase.PREFILL, Phase.DECODE)


def _rank(engine: EngineStepView, settings: DbSettings) -> RankOf:
    """Returns the sort key: starved requests, longest waiting first, then priority and age."""
    starved_s = starvation_s(engine, settings)

    def rank(request: StepRequest) -> Rank:
        if request.waiting_s >= starved_s:
            return (-math.inf, -request.waiting_s, request.arrival_s, request.id)
        return (0.0, priority(request, engine), request.arrival_s, request.id)

    return rank


def first(
    view: DeviceStepView, rank: Callable[[EngineStepView], RankOf], kv_free: int
) -> Head | None:
    """Returns the request with the lowest rank of those that can run; None if none can."""
    heads: list[Head] = []
    for engine in view.engines:
        rank_of = rank(engine)
        for phase, requests in (
            (Phase.PREFILL, _startable(engine, kv_free)),
            (Phase.DECODE, engine.decode),
        ):
            if requests:
                best = min(requests, key=rank_of)
                heads.append(Head(rank_of(best), engine, phase, best))
    return min(heads, key=itemgetter(0), default=None)


def _startable(engine: EngineStepView, kv_free: int) -> Sequence[StepRequest]:
    """Returns the waiting requests whose KV fits if no other one starts."""
    if len(engine.decode) >= engine.batch_max:
        return ()
    return [r for r in engine.prefill if r.kv_tokens * engine.token_bytes <= kv_free]


def step(head: Head, phases: Iterable[Phase], rank_of: RankOf, kv_free: int) -> StepJob:
    """Returns the step of the first of these phases that has a batch. The last one is the head's,
    which always has one."""
    batches = ((phase, _batch(head, phase, rank_of, kv_free)) for phase in phases)
    phase, batch = next((phase, batch) for phase, batch in batches if batch)
    return StepJob(head.engine.model, phase, batch)


def _batch(head: Head, phase: Phase, rank_of: RankOf, kv_free: int) -> tuple[str, ...]:
    """Returns the head and the requests of its service and phase, by priority, that fit."""
    engine = head.engine
    same = sorted(engine.prefill if phase is Phase.PREFILL else engine.decode, key=rank_of)
    same.sort(key=lambda r: r is not head.request)
    if phase is Phase.DECODE:
        return tuple([r.id for r in same[: engine.batch_max]])
    room = max(0, engine.batch_max - len(engine.decode))
    return fitting(same[:room], engine, kv_free)


def _holds_s(head: Head, job: StepJob, view: DeviceStepView, settings: DbSettings) -> float:
    """Returns the time for which the choice holds.

    The head's priority only rises while it executes, so the choice holds until its budget is used
    up or a waiting request starves. A prefill is a single step. So is a starved head's step, since
    afterwards the head is not starved any more.
    """
    if job.phase is Phase.PREFILL or head.rank[0] == -math.inf:
        return 0.0
    held_s = left_s(head.request.executed_s, budget_s(head.engine))
    batch = set(job.requests)
    for engine in view.engines:
        requests = (*engine.prefill, *engine.decode)
        waiting = [r.waiting_s for r in requests if r.id not in batch]
        if waiting:
            held_s = min(held_s, starvation_s(engine, settings) - max(waiting))
    return max(0.0, held_s)
