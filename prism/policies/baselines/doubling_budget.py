"""SeaLLM's scheduling of co-located services: doubling budgets (SeaLLM §4.2, Algorithm 2).

A request's first budget is the mean plus the standard deviation of its service's execution time.
When a budget is used up, one twice as large follows. The request with the least (left budget x mean
execution time of its service) is next, with all requests of its service and phase that fit. This is
shortest work first by the service's profile; requests that exceed it get lower priority. Preemptive
at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Head:
    """Request as a candidate for the next step."""

    rank: Rank
    engine: EngineStepView
    phase: Phase
    request: StepRequest


def choose(view: DeviceStepView, settings: DbSettings) -> StepChoice:
    """Returns a step of the best request that can run, with its batch.

    Preempted requests keep their KV.
    """
    if not idle(view):
        return WAIT
    heads = ranked(view, lambda request, engine: _rank(request, engine, settings))
    free = kv_free_bytes(view)
    for head in heads:
        for phase in _phases(head, settings):
            batch = batch_of(head, phase, heads, free)
            if batch:
                job = StepJob(head.engine.model, phase, batch)
                return StepChoice((job,), _holds_s(head, phase, batch, heads, settings))
    return WAIT


def _phases(head: Head, settings: DbSettings) -> tuple[Phase, ...]:
    """Returns the phases of the best request's service to try, in order of preference.

    A starved request always runs its own phase.
    """
    starved = head.rank[0] == -math.inf
    if not settings.join or starved or head.phase is Phase.PREFILL:
        return (head.phase,)
    return (Phase.PREFILL, Phase.DECODE)


def ranked(view: DeviceStepView, rank: Callable[[StepRequest, EngineStepView], Rank]) -> list[Head]:
    """Returns all requests in the order in which they should be served."""
    found = [
        Head(rank(request, engine), engine, phase, request)
        for engine in view.engines
        for phase, requests in ((Phase.PREFILL, engine.prefill), (Phase.DECODE, engine.decode))
        for request in requests
    ]
    return sorted(found, key=lambda head: head.rank)


def _rank(request: StepRequest, engine: EngineStepView, settings: DbSettings) -> Rank:
    """Returns the sort key: starved requests, longest waiting first, then priority and age."""
    if request.waiting_s >= starvation_s(engine, settings):
        return (-math.inf, -request.waiting_s, request.arrival_s, request.id)
    return (0.0, priority(request, engine), request.arrival_s, request.id)


def batch_of(head: Head, phase: Phase, heads: Sequence[Head], kv_free: int) -> tuple[str, ...]:
    """Returns the head and the requests of its service and phase, by priority, that fit."""
    engine = head.engine
    same = [h.request for h in heads if h.engine.model == engine.model and h.phase is phase]
    same.sort(key=lambda r: r is not head.request)
    if phase is Phase.DECODE:
        return tuple(r.id for r in same[: engine.batch_max])
    room = max(0, engine.batch_max - len(engine.decode))
    return fitting(same[:room], engine, kv_free)


def _holds_s(
    head: Head, phase: Phase, batch: Sequence[str], heads: Sequence[Head], settings: DbSettings
) -> float:
    """Returns the time for which the choice holds.

    The head's priority only rises while it executes, so the choice holds until its budget is used
    up or a waiting request starves. A prefill is a single step. So is a starved head's step, since
    afterwards the head is not starved any more.
    """
    if phase is Phase.PREFILL or head.rank[0] == -math.inf:
        return 0.0
    left = left_s(head.request.executed_s, budget_s(head.engine))
    waiting = (h for h in heads if h.request.id not in batch)
    starves = (starvation_s(h.engine, settings) - h.request.waiting_s for h in waiting)
    return max(0.0, min(left, min(starves, default=math.inf)))
