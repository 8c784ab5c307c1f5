"""Temporal sharing: one engine's step at a time, with the whole device.

`fcfs` is what AlpaServe does for models in a group (AlpaServe §4.3; MuxServe §4.1 and SeaLLM §6.1
run it so: "schedule LLMs with FCFS in a temporal manner, and batch each LLM with continuous
batching").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prism.policies.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepControl,
    StepJob,
    StepRequest,
)

WAIT = StepChoice((), math.inf)
"""Nothing can run; asked again when something changes."""


def idle(view: DeviceStepView) -> bool:
    """No engine executes anything, so that one may have the whole device."""
    return not any(engine.busy for engine in view.engines)


def next_job(engine: EngineStepView, kv_free_bytes: int) -> StepJob | None:
    """The engine's next step under continuous batching: a prefill of what waits and has room,
    oldest first, else a decode of all that run; None without either."""
    room = engine.batch_max - len(engine.decode)
    admitted = fitting(engine.prefill[: max(0, room)], engine, kv_free_bytes)
    if admitted:
        return StepJob(engine.model, Phase.PREFILL, admitted)
    if engine.decode:
        return StepJob(engine.model, Phase.DECODE, tuple(r.id for r in engine.decode))
    return None


def fitting(
    requests: Sequence[StepRequest], engine: EngineStepView, kv_free_bytes: int
) -> tuple[str, ...]:
    """The first requests whose KV fits together."""
    chosen: list[str] = []
    for request in requests:
        kv_free_bytes -= request.kv_tokens * engine.token_bytes
        if kv_free_bytes < 0:
            break
        chosen.append(request.id)
    return tuple(chosen)


def kv_free_bytes(view: DeviceStepView) -> int:
    return view.kv_capacity_bytes - sum(engine.kv_bytes for engine in view.engines)


def oldest_s(engine: EngineStepView) -> float:
    """Arrival of the engine's oldest unfinished request; inf without any."""
    requests = (*engine.prefill, *engine.decode)
    return min((r.arrival_s for r in requests), default=math.inf)


def fcfs(view: DeviceStepView, state: None) -> tuple[StepChoice, None]:
    """The engine whose unfinished request is oldest runs until that one has ended; its other
    requests are batched with it, those of other engines wait behind it."""
    if not idle(view):
        return WAIT, None
    free = kv_free_bytes(view)
    for engine in sorted(view.engines, key=lambda e: (oldest_s(e), e.model)):
        job = next_job(engine, free)
        if job is not None:
            holds_s = math.inf if job.phase is Phase.DECODE else 0.0
            return StepChoice((job,), holds_s), None
    return WAIT, None


FCFS = StepControl(start=lambda view: None, choose=fcfs)
