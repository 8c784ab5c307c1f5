"""SeaLLM's scheduling of co-located services: doubling budgets, preemptive at every step
(SeaLLM §4.2, Algorithm 2).

A request's budget is the mean plus the standard deviation of its service's execution time; each
time it is used up, one twice as large follows. The request with the least (left budget x mean
execution time of its service) goes first, with all requests of its service and phase that fit:
shortest work first, by what is known of a service, and later the further a request exceeds that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prism.policies.baselines.temporal import WAIT, fitting, idle, kv_free_bytes
from prism.policies.steps import (
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
    """What the paper leaves open."""

    # A request that has waited for so many initial budgets of its service goes before all others,
    # the longest waiting first. The paper has such a threshold per service and gives no value; its
    # SLO is five execution times.
    starvation_factor: float = 5.0
    # The service that the best request selects prefills what waits before it decodes, as continuous
    # batching does in the engine that SeaLLM extends (§5). False: Algorithm 2 to the letter, where
    # a new request waits until those of its service that decode have ended or used up their
    # budgets.
    join: bool = True


SHIPPED = DbSettings()


def control(settings: DbSettings = SHIPPED) -> StepControl:
    """Algorithm 2 as step control; it keeps no state, since budgets follow from executed times."""
    return StepControl(
        start=lambda view: None, choose=lambda view, state: (choose(view, settings), None)
    )


def budget_s(engine: EngineStepView) -> float:
    """The first budget Q of the service's requests."""
    return engine.execution_s + engine.execution_std_s


def left_s(executed_s: float, first_s: float) -> float:
    """What is left of the present budget: of first_s, then of 2, 4, 8... times that."""
    end_s, size_s = first_s, first_s
    while executed_s >= end_s * (1 - 1e-12):
        size_s *= 2
        end_s += size_s
    return end_s - executed_s


def priority(request: StepRequest, engine: EngineStepView) -> float:
    """O_r: smaller is served first (§4.2, equation 7 with the budget as remaining time)."""
    return left_s(request.executed_s, budget_s(engine)) * engine.execution_s


def starvation_s(engine: EngineStepView, settings: DbSettings) -> float:
    return settings.starvation_factor * budget_s(engine)


@dataclass(frozen=True, slots=True)
class Head:
    """A request as a candidate for the next step."""

    rank: Rank
    engine: EngineStepView
    phase: Phase
    request: StepRequest


def choose(view: DeviceStepView, settings: DbSettings) -> StepChoice:
    """The best request that can run, and the batch around it. Preempted requests keep their KV."""
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
    """What the service of the best request may do, first what is preferred. A starved one steps."""
    starved = head.rank[0] == -math.inf
    if not settings.join or starved or head.phase is Phase.PREFILL:
        return (head.phase,)
    return (Phase.PREFILL, Phase.DECODE)


def ranked(view: DeviceStepView, rank: Callable[[StepRequest, EngineStepView], Rank]) -> list[Head]:
    """All requests, the one to be served first first."""
    found = [
        Head(rank(request, engine), engine, phase, request)
        for engine in view.engines
        for phase, requests in ((Phase.PREFILL, engine.prefill), (Phase.DECODE, engine.decode))
        for request in requests
    ]
    return sorted(found, key=lambda head: head.rank)


def _rank(request: StepRequest, engine: EngineStepView, settings: DbSettings) -> Rank:
    """Starved ones before all, longest waiting first; then by priority and age."""
    if request.waiting_s >= starvation_s(engine, settings):
        return (-math.inf, -request.waiting_s, request.arrival_s, request.id)
    return (0.0, priority(request, engine), request.arrival_s, request.id)


def batch_of(head: Head, phase: Phase, heads: Sequence[Head], kv_free: int) -> tuple[str, ...]:
    """The head, then requests of its service and phase in order of priority, while they fit."""
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
    """While it executes, the head's priority only rises: the choice holds until its budget is used
    up or a waiting request starves. A prefill is one step, and so is the first of a head that
    starved: it has not waited after it."""
    if phase is Phase.PREFILL or head.rank[0] == -math.inf:
        return 0.0
    left = left_s(head.request.executed_s, budget_s(head.engine))
    waiting = (h for h in heads if h.request.id not in batch)
    starves = (starvation_s(h.engine, settings) - h.request.waiting_s for h in waiting)
    return max(0.0, min(left, min(starves, default=math.inf)))
