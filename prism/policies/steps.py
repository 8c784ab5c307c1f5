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
    """A request that an engine could step."""

    id: str
    arrival_s: float
    prompt_tokens: int
    # That it will hold after its next step.
    kv_tokens: int
    # The time that its steps have taken so far.
    executed_s: float = 0.0
    # Since its last step ended, or since its arrival.
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStepView:
    """A co-located engine."""

    model: str
    # Requests not yet prefilled, oldest first.
    prefill: tuple[StepRequest, ...] = ()
    # Those that have their first token.
    decode: tuple[StepRequest, ...] = ()
    # Phases that are executing now; their requests are in neither of the two.
    busy: frozenset[Phase] = frozenset()
    token_bytes: int = 1
    # What its requests hold of the unit's KV space, per device.
    kv_bytes: int = 0
    # The most since the quotas were last adapted.
    kv_peak_bytes: int = 0
    # Arrival rate x mean tokens x token bytes: its fair part of the KV space up to a factor
    # (MuxServe §3.3).
    weight: float = 1.0
    decode_sm_share: float = 1.0
    batch_max: int = 256
    # Mean and standard deviation of a request's execution time (SeaLLM's profile).
    execution_s: float = 1.0
    execution_std_s: float = 0.0
    # Requests that are executing now.
    executing: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStepView:
    """What step control chooses from."""

    now_s: float
    engines: tuple[EngineStepView, ...]
    # KV space that the engines share, per device.
    kv_capacity_bytes: int
    # The part of the compute that no executing job holds.
    sm_free: float = 1.0


@dataclass(frozen=True, slots=True)
class StepJob:
    """Start one step."""

    model: str
    phase: Phase
    requests: tuple[str, ...]
    # The part of the compute that it gets.
    sm_share: float = 1.0


@dataclass(frozen=True, slots=True)
class StepChoice:
    """What to run."""

    # To start now, beside what executes; empty: wait.
    jobs: tuple[StepJob, ...]
    # For so long the same engine, phase and requests would be chosen after each step, as long as no
    # request is admitted or ends; equal steps of that time need not be asked for one by one.
    holds_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepControl:
    """Pure functions. States are frozen and opaque to the caller."""

    # Makes the state for a device's set of engines, and makes it anew when that set changes.
    start: Callable[[DeviceStepView], Any]
    # From the last state to the next.
    choose: Callable[[DeviceStepView, Any], tuple[StepChoice, Any]]
    # Model -> bytes it may hold per device; admission keeps to them. Empty: no quota.
    kv_quotas: Callable[[Any], Mapping[str, int]] = lambda state: {}
