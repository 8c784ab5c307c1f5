"""Skip-join multi-level feedback queues (FastServe), a baseline of SeaLLM ("SeaLLM-M", §6.3).

The scheduler does not distinguish services. A request joins the first queue with a quantum that
covers its prefill, and moves to the next queue when the quantum is used up. Quanta double from
queue to queue. Within a queue, the oldest request is served first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prism.policies.baselines.doubling_budget import first, left_s, step
from prism.policies.baselines.temporal import WAIT, idle, kv_free_bytes
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    Phase,
    StepChoice,
    StepControl,
    StepRequest,
)


# FastServe tunes these values; here they are constants.
@dataclass(frozen=True, slots=True)
class MlfqSettings:
    quantum_s: float = 0.05
    """Quantum of the first queue."""
    prefill_tokens_per_s: float = 10_000.0
    """Prefill speed for the estimate that selects a request's first queue."""
    starvation_s: float = 30.0
    """Waiting time after which a request is served first."""


def control() -> StepControl:
    """Returns the step control. It keeps no state: queues follow from executed times."""
    settings = MlfqSettings()
    return StepControl(
        start=lambda view: None, choose=lambda view, state: (choose(view, settings), None)
    )


def level(request: StepRequest, settings: MlfqSettings) -> int:
    """Returns the number of the request's queue; 0 is served first."""
    executed_s = request.executed_s
    if not executed_s:
        executed_s = request.prompt_tokens / settings.prefill_tokens_per_s
    return int(math.log2(executed_s / settings.quantum_s + 1))


def choose(view: DeviceStepView, settings: MlfqSettings) -> StepChoice:
    """Returns the batch of the first request that can run, with others of its service and phase.

    As with doubling budgets, the selected service first prefills its waiting requests.
    """
    if not idle(view):
        return WAIT

    def rank(request: StepRequest) -> tuple[float, float, float, str]:
        starved = request.waiting_s >= settings.starvation_s
        queue = -1.0 if starved else float(level(request, settings))
        return (queue, request.arrival_s, 0.0, request.id)

    kv_free = kv_free_bytes(view)
    head = first(view, lambda engine: rank, kv_free)
    if head is None:
        return WAIT
    job = step(head, dict.fromkeys((Phase.PREFILL, head.phase)), rank, kv_free)
    decodes = job.phase is Phase.DECODE
    holds_s = left_s(head.request.executed_s, settings.quantum_s) if decodes else 0.0
    return StepChoice((job,), holds_s)
