"""Skip-join multi-level feedback queues (FastServe), which SeaLLM compares its scheduling with
(SeaLLM §6.3, "SeaLLM-M"): it knows nothing of the services.

A request joins the first queue whose quantum covers its prefill and sinks when the quantum is used
up; quanta double from queue to queue; within a queue the oldest goes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prism.policies.baselines.doubling_budget import batch_of, left_s, ranked
from prism.policies.baselines.temporal import WAIT, idle, kv_free_bytes
from prism.policies.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepControl,
    StepJob,
    StepRequest,
)


# FastServe tunes these; here they are given.
@dataclass(frozen=True, slots=True)
class MlfqSettings:
    quantum_s: float = 0.05
    """Of the first queue."""
    prefill_tokens_per_s: float = 10_000.0
    """Estimates how long a prompt takes, for the queue it joins."""
    starvation_s: float = 30.0
    """A request that waits longer goes first."""


def control() -> StepControl:
    """As step control; queues follow from executed times, so that it keeps no state."""
    settings = MlfqSettings()
    return StepControl(
        start=lambda view: None, choose=lambda view, state: (choose(view, settings), None)
    )


def level(request: StepRequest, settings: MlfqSettings) -> int:
    """The queue that the request is in; 0 is served first."""
    executed_s = request.executed_s
    if not executed_s:
        executed_s = request.prompt_tokens / settings.prefill_tokens_per_s
    return int(math.log2(executed_s / settings.quantum_s + 1))


def choose(view: DeviceStepView, settings: MlfqSettings) -> StepChoice:
    """The first request that can run, and the batch of its service and phase around it. As with
    doubling budgets, the service that it selects prefills what waits before it decodes."""
    if not idle(view):
        return WAIT

    def rank(request: StepRequest, engine: EngineStepView) -> tuple[float, float, float, str]:
        starved = request.waiting_s >= settings.starvation_s
        queue = -1.0 if starved else float(level(request, settings))
        return (queue, request.arrival_s, 0.0, request.id)

    heads, free = ranked(view, rank), kv_free_bytes(view)
    for head in heads:
        for phase in dict.fromkeys((Phase.PREFILL, head.phase)):
            batch = batch_of(head, phase, heads, free)
            if batch:
                decodes = phase is Phase.DECODE
                holds_s = left_s(head.request.executed_s, settings.quantum_s) if decodes else 0.0
                return StepChoice((StepJob(head.engine.model, phase, batch),), holds_s)
    return WAIT
