"""MuxServe's adaptive batch scheduling (ADBS, MuxServe §3.3, Algorithm 3).

Prefills run first, one at a time, round-robin over models. Decodes share the remaining compute,
round-robin as well. Token-block quotas start at each model's fair part of the unit's KV space (rate
x tokens x bytes per token, R of equation 2). Each period they move from models that leave them
unused to models that fill them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prism.policies.baselines.temporal import fitting, kv_free_bytes
from prism.policies.multiplexing.steps import (
    DeviceStepView,
    EngineStepView,
    Phase,
    StepChoice,
    StepControl,
    StepJob,
)

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class AdbsSettings:
    """Parameters that the paper does not specify."""

    # Least fraction of the compute for a prefill, which waits until it is free. It takes more if
    # decoding models leave it.
    prefill_sm_min: float = 0.5
    # Interval of quota changes.
    adapt_every_s: float = 5.0
    # Used fraction of its quota below which a model gives quota.
    low: float = 0.5
    # Used fraction of its quota above which a model receives quota.
    high: float = 0.9
    # Fraction of the unused quota that is given each time.
    given: float = 0.5
    # True: decodes share all remaining compute. False: each keeps its candidate's share, as
    # SeaLLM §6.2 says of MuxServe.
    wider: bool = True
    # Compute that jobs may take together in addition to all of it.
    overcommit: float = 0.0


@dataclass(frozen=True, slots=True)
class AdbsState:
    """Quotas and positions of the two round-robins."""

    # Model -> bytes per device.
    quotas: Mapping[str, int]
    # Time of the next quota change.
    adapt_at_s: float
    # Models served last.
    last_prefill: str = ""
    last_decode: str = ""
    # SM share of the last prefill.
    prefill_sm: float = 0.0


SHIPPED = AdbsSettings()


def control(settings: AdbsSettings = SHIPPED) -> StepControl:
    """Returns Algorithm 3 as step control."""
    return StepControl(
        start=lambda view: start(view, settings),
        choose=lambda view, state: choose(view, state, settings),
        kv_quotas=lambda state: state.quotas,
    )


def start(view: DeviceStepView, settings: AdbsSettings) -> AdbsState:
    return AdbsState(fair_quotas(view), view.now_s + settings.adapt_every_s)


def choose(
    view: DeviceStepView, state: AdbsState, settings: AdbsSettings
) -> tuple[StepChoice, AdbsState]:
    """Runs one pass of Algorithm 3's loop.

    A prefill that lacks compute blocks new decodes, as in the paper. A prefill that lacks KV memory
    does not, and another model's prefill may start: without decodes no memory would be freed.
    """
    if view.now_s >= state.adapt_at_s - ROUNDING:
        quotas = adapted(view, state.quotas, settings)
        state = replace(state, quotas=quotas, adapt_at_s=view.now_s + settings.adapt_every_s)
    prefilling = any(Phase.PREFILL in e.busy for e in view.engines)
    prefill = None if prefilling else _next_prefill(view, state, settings)
    jobs: list[StepJob] = []
    sm_free = view.sm_free + settings.overcommit
    if prefill is not None:
        if prefill.sm_share > sm_free + ROUNDING:
            return StepChoice(()), state
        jobs.append(prefill)
        state = replace(state, last_prefill=prefill.model, prefill_sm=prefill.sm_share)
        sm_free -= prefill.sm_share
    held = state.prefill_sm if prefilling or jobs else 0.0
    wider = _wider(view, held) if settings.wider else 1.0
    decodes = _decodes(view, state.last_decode, sm_free, wider)
    if decodes and len(decodes) < _ready(view):
        state = replace(state, last_decode=decodes[-1].model)
    holds_s = 0.0 if prefilling or jobs else _holds_s(view, state, decodes, wider, settings)
    return StepChoice((*jobs, *decodes), holds_s), state


def _ready(view: DeviceStepView) -> int:
    """Returns the number of models that can start a decode.

    If all of them start, the round-robin does not advance.
    """
    return sum(bool(e.decode) and Phase.DECODE not in e.busy for e in view.engines)


def _round_robin(engines: Sequence[EngineStepView], last: str) -> list[EngineStepView]:
    """Returns the engines in the view's order, starting after `last`."""
    models = [engine.model for engine in engines]
    start = models.index(last) + 1 if last in models else 0
    return [*engines[start:], *engines[:start]]


# --- jobs ----------------------------------------------------------------------------------


def _next_prefill(view: DeviceStepView, state: AdbsState, settings: AdbsSettings) -> StepJob | None:
    """Returns a prefill of the next model whose first request fits, with all that fit."""
    share = _prefill_share(view, settings)
    for engine in _round_robin(view.engines, state.last_prefill):
        requests = _admitted(engine, view, state.quotas)
        if requests:
            return StepJob(engine.model, Phase.PREFILL, requests, share)
    return None


def _prefill_share(view: DeviceStepView, settings: AdbsSettings) -> float:
    """Returns the SM share that decoding models leave, but at least the minimum."""
    decoding = [e for e in view.engines if e.decode or Phase.DECODE in e.busy]
    left = 1.0 - sum(e.decode_sm_share for e in decoding)
    return max(settings.prefill_sm_min, left)


def _admitted(
    engine: EngineStepView, view: DeviceStepView, quotas: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the requests that together fit the engine's quota and the KV space.

    An engine that holds no KV may exceed its quota by one request, since it could not start
    otherwise.
    """
    free = kv_free_bytes(view)
    running = len(engine.decode) + engine.executing
    waiting = engine.prefill[: max(0, engine.batch_max - running)]
    within = min(free, quotas.get(engine.model, 0) - engine.kv_bytes)
    requests = fitting(waiting, engine, within)
    if not requests and engine.kv_bytes == 0:
        requests = fitting(waiting[:1], engine, free)
    return requests


def _decode_shares(view: DeviceStepView) -> float:
    """Returns the sum of the SM shares of all decoding models."""
    return sum(e.decode_sm_share for e in view.engines if e.decode or Phase.DECODE in e.busy)


def _wider(view: DeviceStepView, prefill_sm: float) -> float:
    """Returns the factor by which decodes' shares grow to use the device fully.

    Shares are assigned step by step, and a job alone on the device has all of it (§3.4, Figure 4).
    """
    shares = _decode_shares(view)
    return max(1.0, (1.0 - prefill_sm) / shares) if shares > 0 else 1.0


def _decodes(view: DeviceStepView, last: str, sm_free: float, wider: float) -> list[StepJob]:
    """Returns decodes round-robin while compute is left. `wider` is a factor on their shares."""
    jobs: list[StepJob] = []
    for engine in _round_robin(view.engines, last):
        if not engine.decode or Phase.DECODE in engine.busy:
            continue
        if min(engine.decode_sm_share, 1.0) > sm_free + ROUNDING:
            break
        share = min(engine.decode_sm_share * wider, sm_free, 1.0)
        ids = tuple(r.id for r in engine.decode[: engine.batch_max])
        jobs.append(StepJob(engine.model, Phase.DECODE, ids, share))
        sm_free -= share
    return jobs


def _holds_s(
    view: DeviceStepView,
    state: AdbsState,
    decodes: Sequence[StepJob],
    wider: float,
    settings: AdbsSettings,
) -> float:
    """Returns the time for which the decodes can be repeated.

    If all fit concurrently with their whole shares, they continue until the next quota change.
    Waiting requests get memory only when a running one ends.
    """
    whole = {e.model: min(e.decode_sm_share * wider, 1.0) for e in view.engines}
    reduced = any(job.sm_share < whole[job.model] - ROUNDING for job in decodes)
    most = 1.0 + settings.overcommit + ROUNDING
    if reduced or len(decodes) < _ready(view) or _decode_shares(view) > most:
        return 0.0
    return max(0.0, state.adapt_at_s - view.now_s)


# --- quotas --------------------------------------------------------------------------------


def fair_quotas(view: DeviceStepView) -> dict[str, int]:
    """Returns quotas proportional to the engines' `weight`; equal parts if all are zero."""
    total = sum(e.weight for e in view.engines)
    shares = {
        e.model: e.weight / total if total > 0 else 1 / len(view.engines) for e in view.engines
    }
    return {model: int(view.kv_capacity_bytes * share) for model, share in shares.items()}


def adapted(
    view: DeviceStepView, quotas: Mapping[str, int], settings: AdbsSettings
) -> dict[str, int]:
    """Moves quota from models that use little of it to models that use most of it.

    Receivers share it in proportion to their weights. The sum of quotas is constant, and no quota
    falls below its model's use.
    """
    moved = dict(quotas)
    used = {e.model: max(e.kv_bytes, e.kv_peak_bytes) for e in view.engines}
    receivers = [e for e in view.engines if used[e.model] > settings.high * quotas[e.model]]
    weight = sum(e.weight for e in receivers)
    if not receivers:
        return moved
    given = 0
    for engine in view.engines:
        unused = quotas[engine.model] - used[engine.model]
        if used[engine.model] < settings.low * quotas[engine.model]:
            part = int(settings.given * unused)
            moved[engine.model] -= part
            given += part
    left = given
    for engine in receivers:
        share = engine.weight / weight if weight > 0 else 1 / len(receivers)
        part = left if engine is receivers[-1] else int(given * share)
        moved[engine.model] += part
        left -= part
    return moved
