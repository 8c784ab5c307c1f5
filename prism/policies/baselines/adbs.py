"""MuxServe's adaptive batch scheduling (MuxServe §3.3, Algorithm 3): prefills first, one at a time
and in turn; the rest of the compute to decodes, in turn; token-block quotas that adapt.

Quotas start at each model's fair part of the unit's KV space (rate x tokens x bytes per token, R of
equation 2) and move, period by period, from models that leave theirs unused to those that fill it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prism.policies.baselines.temporal import fitting, kv_free_bytes
from prism.policies.steps import (
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
    """What the paper does not state."""

    # A prefill waits until so much of the compute is free, and takes more if the models that decode
    # leave it.
    prefill_sm_min: float = 0.5
    # How often quotas are moved.
    adapt_every_s: float = 5.0
    # A model that used less than this part of its quota gives.
    low: float = 0.5
    # One that used more than this part receives.
    high: float = 0.9
    # The part of what is unused that is given at a time.
    given: float = 0.5
    # Decodes take what is left of the compute. False: each keeps the share of its candidate, as
    # SeaLLM §6.2 says of MuxServe.
    wider: bool = True


@dataclass(frozen=True, slots=True)
class AdbsState:
    """Quotas and whose turn it is."""

    # Bytes per device.
    quotas: Mapping[str, int]
    # When they move next.
    adapt_at_s: float
    # The models served last.
    last_prefill: str = ""
    last_decode: str = ""
    # What the last prefill took of the compute.
    prefill_sm: float = 0.0


SHIPPED = AdbsSettings()


def control(settings: AdbsSettings = SHIPPED) -> StepControl:
    """Algorithm 3 as step control."""
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
    """One pass of Algorithm 3's loop.

    A prefill that lacks compute stops new decodes until it has it, as in the paper. One that lacks
    KV memory does not, and another model's goes first: without decodes memory would never return.
    """
    if view.now_s >= state.adapt_at_s - ROUNDING:
        quotas = adapted(view, state.quotas, settings)
        state = replace(state, quotas=quotas, adapt_at_s=view.now_s + settings.adapt_every_s)
    prefilling = any(Phase.PREFILL in e.busy for e in view.engines)
    prefill = None if prefilling else _next_prefill(view, state, settings)
    jobs: list[StepJob] = []
    sm_free = view.sm_free
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
    holds_s = 0.0 if prefilling or jobs else _holds_s(view, state, decodes, wider)
    return StepChoice((*jobs, *decodes), holds_s), state


def _ready(view: DeviceStepView) -> int:
    """Models that could start a decode. If all of them do, no turn is over."""
    return sum(bool(e.decode) and Phase.DECODE not in e.busy for e in view.engines)


def _in_turn(engines: Sequence[EngineStepView], last: str) -> list[EngineStepView]:
    """By name, those after `last` first."""
    return sorted(engines, key=lambda e: (e.model <= last, e.model))


# --- jobs ----------------------------------------------------------------------------------


def _next_prefill(view: DeviceStepView, state: AdbsState, settings: AdbsSettings) -> StepJob | None:
    """The next model in turn whose first request fits its quota, with all that fit."""
    share = _prefill_share(view, settings)
    for engine in _in_turn(view.engines, state.last_prefill):
        requests = _admitted(engine, view, state.quotas)
        if requests:
            return StepJob(engine.model, Phase.PREFILL, requests, share)
    return None


def _prefill_share(view: DeviceStepView, settings: AdbsSettings) -> float:
    """What models with decodes leave of the device, but at least the minimum."""
    decoding = [e for e in view.engines if e.decode or Phase.DECODE in e.busy]
    left = 1.0 - sum(e.decode_sm_share for e in decoding)
    return max(settings.prefill_sm_min, left)


def _admitted(
    engine: EngineStepView, view: DeviceStepView, quotas: Mapping[str, int]
) -> tuple[str, ...]:
    """Requests that fit the engine's quota and the space together. An engine that holds nothing may
    exceed its quota by one request, since it could not start otherwise."""
    free = kv_free_bytes(view)
    running = len(engine.decode) + engine.executing
    waiting = engine.prefill[: max(0, engine.batch_max - running)]
    within = min(free, quotas.get(engine.model, 0) - engine.kv_bytes)
    requests = fitting(waiting, engine, within)
    if not requests and engine.kv_bytes == 0:
        requests = fitting(waiting[:1], engine, free)
    return requests


def _own(view: DeviceStepView) -> float:
    """Shares of all models that decode."""
    return sum(e.decode_sm_share for e in view.engines if e.decode or Phase.DECODE in e.busy)


def _wider(view: DeviceStepView, prefill_sm: float) -> float:
    """What prefills and their own shares leave of the device is the decodes' too, in proportion:
    shares are assigned step by step, and a job that is alone has all of it (§3.4, Figure 4)."""
    own = _own(view)
    return max(1.0, (1.0 - prefill_sm) / own) if own > 0 else 1.0


def _decodes(view: DeviceStepView, last: str, sm_free: float, wider: float) -> list[StepJob]:
    """Decodes in turn while the compute lasts. wider: factor on their shares."""
    jobs: list[StepJob] = []
    for engine in _in_turn(view.engines, last):
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
    view: DeviceStepView, state: AdbsState, decodes: Sequence[StepJob], wider: float
) -> float:
    """Decodes that all fit side by side, each with its whole share, go on until the quotas move:
    requests that wait for memory get some only when one ends."""
    whole = {e.model: min(e.decode_sm_share * wider, 1.0) for e in view.engines}
    squeezed = any(job.sm_share < whole[job.model] - ROUNDING for job in decodes)
    if squeezed or len(decodes) < _ready(view) or _own(view) > 1.0 + ROUNDING:
        return 0.0
    return max(0.0, state.adapt_at_s - view.now_s)


# --- quotas --------------------------------------------------------------------------------


def fair_quotas(view: DeviceStepView) -> dict[str, int]:
    """The KV space in proportion to the models' weights; equal parts if none has any."""
    total = sum(e.weight for e in view.engines)
    shares = {
        e.model: e.weight / total if total > 0 else 1 / len(view.engines) for e in view.engines
    }
    return {model: int(view.kv_capacity_bytes * share) for model, share in shares.items()}


def adapted(
    view: DeviceStepView, quotas: Mapping[str, int], settings: AdbsSettings
) -> dict[str, int]:
    """Blocks go from models that use little of their quota to those that use most of it, in
    proportion to these models' weights. The sum stays, and no quota falls below what its model
    used."""
    moved = dict(quotas)
    used = {e.model: max(e.kv_bytes, e.kv_peak_bytes) for e in view.engines}
    takers = [e for e in view.engines if used[e.model] > settings.high * quotas[e.model]]
    weight = sum(e.weight for e in takers)
    if not takers:
        return moved
    pot = 0
    for engine in view.engines:
        unused = quotas[engine.model] - used[engine.model]
        if used[engine.model] < settings.low * quotas[engine.model]:
            part = int(settings.given * unused)
            moved[engine.model] -= part
            pot += part
    left = pot
    for engine in takers:
        share = engine.weight / weight if weight > 0 else 1 / len(takers)
        part = left if engine is takers[-1] else int(pot * share)
        moved[engine.model] += part
        left -= part
    return moved
