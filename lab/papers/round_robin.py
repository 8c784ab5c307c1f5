"""Engines take turns of one step each: the other temporal order that the papers compare with
(MuxServe §4.4, SeaLLM §2.2)."""

from __future__ import annotations

import math

from prism.policies.baselines.temporal import WAIT, idle, kv_free_bytes, next_job
from prism.policies.steps import DeviceStepView, Phase, StepChoice, StepControl


def round_robin(view: DeviceStepView, state: int) -> tuple[StepChoice, int]:
    """Engines with work take turns of one step each. `state`: whose turn it is."""
    if not idle(view):
        return WAIT, state
    free = kv_free_bytes(view)
    engines = sorted(view.engines, key=lambda e: e.model)
    turns = range(state, state + len(engines))
    jobs = [(turn, next_job(engines[turn % len(engines)], free)) for turn in turns]
    ready = [(turn, job) for turn, job in jobs if job is not None]
    if not ready:
        return WAIT, state
    turn, job = ready[0]
    alone = len(ready) == 1 and job.phase is Phase.DECODE
    return StepChoice((job,), math.inf if alone else 0.0), (turn + 1) % len(engines)


ROUND_ROBIN = StepControl(start=lambda view: 0, choose=round_robin)
