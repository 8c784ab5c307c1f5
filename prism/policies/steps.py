"""Step control: which of a device's co-located engines runs its next step, on which requests, with
what share of the compute.

A step is one prefill (of the requests named) or one decode iteration of an engine. The caller asks
again whenever a job ends, a request is admitted or ends, or `holds_s` have passed. Tensor-parallel
engines are controlled on the device of their rank 0. Pure data; times in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class StepRequest(NamedTuple):
    """A request that an engine could step. executed_s: the time that its steps have taken so far;
    waiting_s: since its last step ended, or since its arrival. kv_tokens: KV tokens that it will
    hold after its next step."""

    id: str
    arrival_s: float
    prompt_tokens: int
    kv_tokens: int
    executed_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStepView:
    """A co-located engine. `prefill`: requests not yet prefilled, oldest first; `decode`: those
    that have their first token. busy: phases that are executing now; their requests are in neither;
    executing: how many these are.

    kv_bytes: what its requests hold of the unit's KV space, reported per device; kv_peak_bytes:
    the most since the quotas were last adapted. execution_s and execution_std_s: mean and standard
    deviation of a request's execution time (SeaLLM's profile). weight: arrival rate x mean tokens
    x token bytes, its fair part of the KV space up to a factor (MuxServe §3.3)."""

    model: str
    prefill: tuple[StepRequest, ...] = ()
    decode: tuple[StepRequest, ...] = ()
    busy: frozenset[Phase] = frozenset()
    token_bytes: int = 1
    kv_bytes: int = 0
    kv_peak_bytes: int = 0
    weight: float = 1.0
    decode_sm_share: float = 1.0
    batch_max: int = 256
    execution_s: float = 1.0
    execution_std_s: float = 0.0
    executing: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStepView:
    """kv_capacity_bytes: KV space that the engines share, per device. sm_free: the part of the
    compute that no executing job holds."""

    now_s: float
    engines: tuple[EngineStepView, ...]
    kv_capacity_bytes: int
    sm_free: float = 1.0


@dataclass(frozen=True, slots=True)
class StepJob:
    """Start one step. sm_share: the part of the compute it gets."""

    model: str
    phase: Phase
    requests: tuple[str, ...]
    sm_share: float = 1.0


@dataclass(frozen=True, slots=True)
class StepChoice:
    """`jobs`: start these now, beside what executes; empty: wait. holds_s: for so long the same
    engine, phase and requests would be chosen after each step, as long as no request is admitted
    or ends; equal steps of that time need not be asked for one by one."""

    jobs: tuple[StepJob, ...]
    holds_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepControl:
    """`start` makes the state for a device's set of engines, and makes it anew when that set
    changes; `choose` is given the last state and returns the next. States are frozen and opaque to
    the caller. kv_quotas(state): model -> bytes it may hold per device; admission keeps to them;
    empty: no quota."""

    start: Callable[[DeviceStepView], Any]
    choose: Callable[[DeviceStepView, Any], tuple[StepChoice, Any]]
    kv_quotas: Callable[[Any], Mapping[str, int]] = lambda state: {}
