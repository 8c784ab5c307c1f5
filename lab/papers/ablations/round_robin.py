"""Round-robin scheduling of engines by steps, a baseline of MuxServe (§4.4) and SeaLLM (§2.2)."""

from __future__ import annotations

import math

from prism.policies.baselines.temporal import WAIT, idle, kv_free_bytes, next_job
from prism.policies.multiplexing.steps import DeviceStepView, Phase, StepChoice, StepControl


def round_robin(view: DeviceStepView, state: int) -> tuple[StepChoice, int]:
    """Gives each engine with work one step in turn.

    Args:
        state: Index of the engine that is next.
    """
    if not idle(view):
        return WAIT, state
    free = kv_free_bytes(view)
    engines = sorted(view.engines, key=lambda e: e.model)
    indices = range(state, state + len(engines))
    jobs = [(index, next_job(engines[index % len(engines)], free)) for index in indices]
    ready = [(index, job) for index, job in jobs if job is not None]
    if not ready:
        return WAIT, state
    index, job = ready[0]
    alone = len(ready) == 1 and job.phase is Phase.DECODE
    return StepChoice((job,), math.inf if alone else 0.0), (index + 1) % len(engines)


ROUND_ROBIN = StepControl(start=lambda view: 0, choose=round_robin)
