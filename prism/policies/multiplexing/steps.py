"""Step control of a device's co-located engines: the next step's engine, requests and SM share.

A step is one prefill (of the requests named) or one decode iteration of an engine. The caller asks
again whenever a job ends, a request is admitted or ends, or after `holds_s`. Tensor-parallel
engines are controlled on the device of their rank 0. Pure data; times in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class StepRequest(NamedTuple):
    """Request that an engine can step."""

    id: str
    arrival_s: float
    prompt_tokens: int
    # KV tokens that it holds after its next step.
    kv_tokens: int
    # Total time of its steps so far.
    executed_s: float = 0.0
    # Time since its last step ended, or since its arrival.
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStepView:
    """Co-located engine."""

    model: str
    # Requests not yet prefilled, oldest first.
    prefill: tuple[StepRequest, ...] = ()
    # Requests that have their first token.
    decode: tuple[StepRequest, ...] = ()
    # Phases that are executing now. Their requests are in neither `prefill` nor `decode`.
    busy: frozenset[Phase] = frozenset()
    token_bytes: int = 1
    # KV memory of its requests per device, in the unit's shared space.
    kv_bytes: int = 0
    # Peak of kv_bytes since the quotas were last adapted.
    kv_peak_bytes: int = 0
    # Arrival rate x mean tokens x token bytes, to which its fair part of the KV space is
    # proportional (MuxServe §3.3).
    weight: float = 1.0
    decode_sm_share: float = 1.0
    batch_max: int = 256
    # Mean and standard deviation of a request's execution time (SeaLLM's profile).
    execution_s: float = 1.0
    execution_std_s: float = 0.0
    # Number of requests that are executing now.
    executing: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStepView:
    """Input of step control for one device."""

    now_s: float
    engines: tuple[EngineStepView, ...]
    # KV space that the engines share, per device.
    kv_capacity_bytes: int
    # Fraction of the compute that no executing job holds.
    sm_free: float = 1.0


@dataclass(frozen=True, slots=True)
class StepJob:
    """Step to start."""

    model: str
    phase: Phase
    # Request ids.
    requests: tuple[str, ...]
    # Fraction of the compute for this step.
    sm_share: float = 1.0


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Result of step control."""

    # Jobs to start now, in addition to those that are executing; empty: wait.
    jobs: tuple[StepJob, ...]
    # Time for which each next step would have the same engine, phase and requests, unless a request
    # is admitted or ends. The caller may repeat the step for that long without asking.
    holds_s: float = 0.0


NO_QUOTAS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepControl:
    """Step control of a policy: pure functions. States are frozen and opaque to the caller."""

    # Returns the initial state for a device's set of engines. Called again when that set changes.
    start: Callable[[DeviceStepView], Any]
    # (view, last state) -> (choice, next state).
    choose: Callable[[DeviceStepView, Any], tuple[StepChoice, Any]]
    # Returns model -> KV quota in bytes per device, which admission enforces. Empty: no quotas.
    kv_quotas: Callable[[Any], Mapping[str, int]] = lambda state: NO_QUOTAS
