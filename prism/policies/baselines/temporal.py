"""Temporal sharing: one engine's step at a time, with the whole device.

`fcfs` is AlpaServe's scheduling of models in a group (AlpaServe §4.3). MuxServe §4.1 and SeaLLM
§6.1 evaluate it as: "schedule LLMs with FCFS in a temporal manner, and batch each LLM with
continuous batching".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepControl,
    StepJob,
    StepRequest,
)

WAIT = StepChoice((), math.inf)
"""Choice if no step can run. The caller asks again when something changes."""


def idle(view: DeviceStepView) -> bool:
    """Returns True if no engine is executing a step."""
    return not any(engine.busy for engine in view.engines)


def next_job(engine: EngineStepView, kv_free_bytes: int) -> StepJob | None:
    """Returns the engine's next step under continuous batching, or None.

    It is a prefill of waiting requests that fit, oldest first, else a decode of all running ones.
    """
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
    """Returns the ids of the first requests whose KV fits together."""
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
    """Returns the arrival of the engine's oldest unfinished request; infinity without any."""
    requests = (*engine.prefill, *engine.decode)
    return min((r.arrival_s for r in requests), default=math.inf)


def fcfs(view: DeviceStepView, state: None) -> tuple[StepChoice, None]:
    """Chooses the engine with the oldest unfinished request, until that request has ended.

    The engine's other requests are batched with it. Other engines wait.
    """
    if not idle(view):
        return WAIT, None
    free = kv_free_bytes(view)
    waiting = (engine for engine in view.engines if engine.prefill or engine.decode)
    for engine in sorted(waiting, key=oldest_s):
        job = next_job(engine, free)
        if job is not None:
            holds_s = math.inf if job.phase is Phase.DECODE else 0.0
            return StepChoice((job,), holds_s), None
    return WAIT, None


FCFS = StepControl(start=lambda view: None, choose=fcfs)
