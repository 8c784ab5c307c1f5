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
class Job:
    """A waiting request as the local scheduler sees it (Prism §6.3).

    deadline_s = arrival + TTFT SLO; prefill_s = prompt tokens / the model's prefill speed;
    ready_in_s: what is left of its model's activation.
    """

    id: str
    model: str
    arrival_s: float
    deadline_s: float
    prefill_s: float
    ready_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Order:
    """`on_time`: the largest set that meets its deadlines, in dispatch order (earliest deadline
    first); `late`: the rest, oldest first, served after the others and never dropped."""

    on_time: tuple[Job, ...]
    late: tuple[Job, ...]


class ModelView(msgspec.Struct, frozen=True):
    """A model as the cluster scheduler sees it. A Struct, since every plan takes one of each model.

    weight_bytes includes the engine's non-elastic share; kv_floor_bytes is the KV memory that
    must stay free beside the weights for the model to serve at all. token_rate: prompt tokens of
    admitted requests plus decoded tokens per second over the rate window (DESIGN: about 60 s).
    idle_s: seconds since its last request ended or arrived.
    state: "absent" | "activating" | "active" | "draining" | "migrating" (serves on `device` while
    it is brought up on another one).
    wanted: to be resident although no request waits (initial placement, lost with its device).
    barred: devices where its activation failed a moment ago and is not tried again yet.
    tp: tensor-parallel degree; weight_bytes, token_bytes and kv_floor_bytes are of the whole model,
    one part in `tp` on each of its devices: `device` holds rank 0, `peers` the others in order.
    share_bytes: the engine's part of weight_bytes on each of its `tp` devices, the same at whatever
    degree; 0 where it runs at this degree only.
    startup_s: device -> estimated seconds until it could serve there; empty: not known.
    moving_to: where a "migrating" copy is brought up, rank 0 first; known of the simulator's, whose
    models have several copies.
    A model with several replicas has a view for each of them, under the same name.
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
    wanted: bool = False
    barred: tuple[str, ...] = ()
    tp: int = 1
    peers: tuple[str, ...] = ()
    startup_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    share_bytes: int = 0
    moving_to: tuple[str, ...] = ()


class GpuView(msgspec.Struct, frozen=True):
    """A device. free_bytes: capacity minus everything reserved now (weights, floors, KV).

    fixed_bytes: held by nothing in `ClusterView.models`. engines_free: engines that could take a
    model now; `alive`: its agent answers, so that models can be activated on it. `node`: devices of
    one node have fast links; a tensor-parallel model stays within one.
    """

    name: str
    capacity_bytes: int
    fixed_bytes: int = 0
    free_bytes: int = 0
    engines_free: int = 0
    engines_total: int = 0
    alive: bool = True
    node: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """`rebalance`: the scheduling interval has passed, so that models may be moved (§6.2).
    target: what the policy's placement search found last, for policies that have one; queues: the
    devices' virtual queues, for policies that assign requests. replicas: a model may be activated
    on a second device while it serves on the first; `waiting` of its views is the model's."""

    now_s: float
    models: tuple[ModelView, ...]
    gpus: tuple[GpuView, ...]
    rebalance: bool = True
    target: Placement | None = None
    queues: tuple[VirtualQueue, ...] = ()
    replicas: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What a cluster policy can be tuned with.

    idle_threshold_s: models idle longer may be evicted when memory is short (§6.2).
    migration_threshold: tau of Algorithm 1, the relative gain in KVPR that justifies a move.
    contended_requests: a device whose models run fewer requests at a time beside the busiest one
    (`beside`), or where fewer wait while memory is to spare, has nothing worth a move, however
    uneven pressures are: tau is relative, at low load a single request changes them by any factor,
    and rates are of the past. 0: every move of Algorithm 1 that has room.
    min_idle_s: the shortest idle time after which a model may be evicted for a waiting request
    that nothing else can serve. short_fraction: a device with less than this part of its capacity
    free is short of memory. move_running: see `Migrate`.
    """

    idle_threshold_s: float = 45.0
    migration_threshold: float = 0.2
    contended_requests: float = 4.0
    min_idle_s: float = 1.0
    short_fraction: float = 0.05
    move_running: bool = False


class DeviceLoad(msgspec.Struct, frozen=True):
    """beside: requests that run there at a time if each goes at its SLO's pace, but for the busiest
    model's (`beside`); free_part: of its memory."""

    beside: float
    free_part: float


def beside(running: Collection[float]) -> float:
    """running: per model of a device, token rate x TPOT SLO (Little's law). All but the busiest: it
    takes two to contend, and a model that is alone is nowhere better off."""
    return sum(running) - max(running) if len(running) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Activate:
    """peers: the devices of ranks 1 and up of a tensor-parallel model. kv_limit_bytes: the most KV
    memory it may hold per device."""

    model: str
    device: str
    reason: str
    kv_limit_bytes: int | None = None
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """`device`: of rank 0; the peers follow. move_running: what runs there goes on at another copy
    of the model, instead of finishing; without one it waits for one. Live, it finishes."""

    model: str
    device: str
    reason: str
    move_running: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """`source`, `target`: the devices of rank 0; peers: where the other ranks go. move_running:
    what runs at the source goes on at the target with its KV, instead of finishing there."""

    model: str
    source: str
    target: str
    reason: str
    peers: tuple[str, ...] = ()
    move_running: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """The model cannot be placed now; `reason` says how many bytes are missing and where."""

    model: str
    reason: str


Action = Activate | Evict | Migrate | Refuse
