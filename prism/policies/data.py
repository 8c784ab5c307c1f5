"""Frozen data that policies read and the actions they return. Plain values, no behaviour.

All times are seconds on one clock chosen by the caller (`now_s`), all sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """A waiting request as the local scheduler sees it (Prism §6.3).

    deadline_s = arrival + TTFT SLO; prefill_s = prompt tokens / the model's prefill speed.
    """

    id: str
    model: str
    arrival_s: float
    deadline_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Order:
    """`on_time`: the largest set that meets its deadlines, in dispatch order (earliest deadline
    first); `late`: the rest, oldest first, served after the others and never dropped."""

    on_time: tuple[Job, ...]
    late: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as the cluster scheduler sees it.

    weight_bytes includes the engine's non-elastic share; kv_floor_bytes is the KV memory that
    must stay free beside the weights for the model to serve at all. token_rate: prompt tokens of
    admitted requests plus decoded tokens per second over the rate window (DESIGN: about 60 s).
    idle_s: seconds since its last request ended or arrived.
    state: "absent" | "activating" | "active" | "draining".
    """

    name: str
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    token_rate: float = 0.0
    waiting: int = 0
    running: int = 0
    idle_s: float = float("inf")
    device: str | None = None
    state: str = "absent"
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None


@dataclass(frozen=True, slots=True)
class GpuView:
    """A device. free_bytes: capacity minus everything reserved now (weights, floors, KV)."""

    name: str
    capacity_bytes: int
    fixed_bytes: int = 0
    free_bytes: int = 0
    engines_free: int = 0


@dataclass(frozen=True, slots=True)
class ClusterView:
    now_s: float
    models: tuple[ModelView, ...]
    gpus: tuple[GpuView, ...]


@dataclass(frozen=True, slots=True)
class Activate:
    model: str
    device: str
    reason: str
    kv_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    model: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Migrate:
    model: str
    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The model cannot be placed now; `reason` says how many bytes are missing and where."""

    model: str
    reason: str


Action = Activate | Evict | Migrate | Refuse
