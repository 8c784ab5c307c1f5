"""Frozen data that policies read and the actions they return. Plain values, no behaviour.

All times are seconds on one clock chosen by the caller (`now_s`), all sizes bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from prism.policies.placement import Placement
from prism.policies.queues import VirtualQueue


@dataclass(frozen=True, slots=True)
class AdmissionJob:
    """A waiting request as the local scheduler sees it (Prism §6.3)."""

    id: str
    model: str
    arrival_s: float
    # Arrival plus TTFT SLO.
    deadline_s: float
    # Prompt tokens / the model's prefill speed.
    prefill_s: float
    # What is left of its model's activation.
    ready_in_s: float = 0.0
    # Those of a higher one start first.
    priority: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionOrder:
    """In which order waiting requests start."""

    # The largest set that meets its deadlines, earliest deadline first; of each priority in turn.
    on_time: tuple[AdmissionJob, ...]
    # The rest, oldest first. They start after the others of their priority and are never dropped.
    late: tuple[AdmissionJob, ...]


class ModelView(msgspec.Struct, frozen=True):
    """A model as the cluster scheduler sees it. A model with several replicas has a view for each
    of them, under the same name. Sizes are of the whole model; each of its `tp` devices holds a
    part."""

    name: str
    # With the engine's non-elastic share.
    weight_bytes: int
    token_bytes: int
    # KV memory that must stay free beside the weights for the model to serve at all.
    kv_floor_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    # Prompt tokens of admitted requests plus decoded tokens, per second over the rate window.
    token_rate: float = 0.0
    waiting: int = 0
    running: int = 0
    # Seconds since its last request ended or arrived.
    idle_s: float = float("inf")
    # Seconds until it has been up for as long as it took to load.
    owes_s: float = 0.0
    # Of rank 0; `peers` has the other ranks in order.
    device: str | None = None
    # "absent", "activating", "active", "draining", or "migrating": it serves on `device` while it
    # is brought up on another one.
    state: str = "absent"
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    # To be resident although no request waits (initial placement, lost with its device).
    wanted: bool = False
    # Devices where its activation failed a moment ago and is not tried again yet.
    barred: tuple[str, ...] = ()
    # Tensor-parallel degree.
    tp: int = 1
    peers: tuple[str, ...] = ()
    # Device -> estimated seconds until it could serve there; empty: not known.
    startup_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    # The engine's part of weight_bytes on each device, the same at any degree; 0 where the model
    # runs at this degree only.
    share_bytes: int = 0
    # Where a "migrating" copy is brought up, rank 0 first.
    moving_to: tuple[str, ...] = ()
    # How many copies it may have; the policy chooses where.
    replicas_min: int = 1
    replicas_max: int = 1
    # Since when the first of this copy's waiting requests waits, in seconds.
    oldest_wait_s: float = 0.0
    # How long its last activation took; 0: not known.
    load_s: float = 0.0
    # A copy's token rate when one of the model was saturated last; 0: none ever was.
    saturated_rate: float = 0.0


class GpuView(msgspec.Struct, frozen=True):
    """A device."""

    name: str
    capacity_bytes: int
    # Held by nothing in `ClusterView.models`.
    fixed_bytes: int = 0
    # Capacity minus everything reserved now (weights, floors, KV).
    free_bytes: int = 0
    # Engines that could take a model now.
    engines_free: int = 0
    engines_total: int = 0
    # Whether models can be activated on it: its agent answers, and it is not drained.
    alive: bool = True
    # Models that are here have to leave.
    drained: bool = False
    # Devices of one node have fast links. A tensor-parallel model stays within one.
    node: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a policy plans from."""

    now_s: float
    models: tuple[ModelView, ...]
    gpus: tuple[GpuView, ...]
    # The scheduling interval has passed, so that models may be moved (§6.2).
    rebalance: bool = True
    # What the policy's placement search found last, for policies that have one.
    target: Placement | None = None
    # The devices' virtual queues, for policies that assign requests.
    queues: tuple[VirtualQueue, ...] = ()
    # Whether a model may be activated on a second device while it serves on the first; `waiting` of
    # its views is the model's.
    replicas: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What a cluster policy can be tuned with."""

    # Models idle for longer may be evicted when memory is short (§6.2).
    idle_threshold_s: float = 45.0
    # Tau of Algorithm 1: the relative gain in KVPR that justifies a move.
    migration_threshold: float = 0.2
    # A device is left as it is where fewer requests run beside the busiest model's (`beside`), or
    # where fewer wait while memory is to spare. Tau alone would move models for nothing: it is
    # relative, at low load a single request changes pressures by any factor, and rates are of the
    # past. 0: every move of Algorithm 1 that has room.
    contended_requests: float = 4.0
    # The shortest idle time after which a model may be evicted for a waiting request that nothing
    # else can serve.
    min_idle_s: float = 1.0
    # A device with less than this part of its capacity free is short of memory.
    short_fraction: float = 0.05
    # See `Migrate`.
    move_running: bool = False


class DeviceLoad(msgspec.Struct, frozen=True):
    """What tells whether a device may need a move."""

    # Requests that run there at a time if each goes at its SLO's pace, but for the busiest model's
    # (`beside`).
    beside: float
    # Of its memory.
    free_part: float
    # A model there may need another copy, or has several, of which one may leave.
    copies: bool = False


def beside(running: Collection[float]) -> float:
    """running: per model of a device, token rate x TPOT SLO (Little's law). All but the busiest: it
    takes two to contend, and a model that is alone is nowhere better off."""
    return sum(running) - max(running) if len(running) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Activate:
    """Bring the model up."""

    model: str
    device: str
    reason: str
    # The most KV memory it may hold per device.
    kv_limit_bytes: int | None = None
    # The devices of ranks 1 and up of a tensor-parallel model.
    peers: tuple[str, ...] = ()
    # Another copy serves the model: requests come here only once this one is up.
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """Stop the model on these devices."""

    model: str
    # Of rank 0; the peers follow.
    device: str
    reason: str
    # Running requests go on at another copy of the model, or wait for one, instead of finishing.
    # Without another copy the live system lets them finish.
    move_running: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """Bring the model up at the target, then stop it at the source."""

    model: str
    # Of rank 0, as `target` is.
    source: str
    target: str
    reason: str
    # Where the other ranks go.
    peers: tuple[str, ...] = ()
    # Running requests go on at the target, instead of finishing at the source.
    move_running: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """The model cannot be placed now; `reason` says how many bytes are missing and where."""

    model: str
    reason: str


Action = Activate | Evict | Migrate | Refuse
