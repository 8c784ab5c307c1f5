"""Input of policies and the actions that they return: frozen data without behaviour.

All times are in seconds on one clock of the caller (`now_s`), all sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import msgspec

from prism.policies.multiplexing.turns import InstanceTurn
from prism.policies.placement import Placement
from prism.policies.queues import VirtualQueue


class Waiting(msgspec.Struct, frozen=True):
    """Request in the queue of a device (Prism §6.3).

    A suspect is a request that may have killed its engine. It starts before all other requests, on
    an idle engine. Nothing else starts there until it is cleared or ended.
    """

    id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    deadline_s: float  # arrival plus TTFT SLO
    suspected_at: int | None = None  # output tokens at the engine's death; None: not a suspect
    priority: int = 0  # requests of a higher priority start first


class RequestNeed(Protocol):
    """KV that requests take of an engine, in tokens of its main pool."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, which requests take as a whole."""

    @property
    def window_tokens(self) -> int:
        """Most tokens that a request keeps in layers with a sliding window."""

    @property
    def window_share(self) -> float:
        """Size of a token in these layers."""

    @property
    def state_tokens(self) -> int:
        """Size of a request's state."""


def request_kv_tokens(need: RequestNeed, num_tokens: int) -> int:
    """Returns the KV that a request of this size takes, in all pools."""
    tokens = -(-num_tokens // need.block_tokens) * need.block_tokens
    return tokens + side_kv_tokens(need, tokens)


def side_kv_tokens(need: RequestNeed, tokens: float) -> int:
    """Returns the KV that a request of `tokens`, in whole blocks, takes besides the main pool."""
    return ceil(min(tokens, need.window_tokens) * need.window_share) + need.state_tokens


class EngineView(msgspec.Struct, frozen=True):
    """Engine that serves or activates a model on this device, as admission sees it.

    A Struct, because one is built per engine and step.
    """

    model: str
    available_tokens: int  # free mapped tokens, and those that the ledger would grant now
    running: int  # number of requests
    max_running: int
    block_tokens: int
    prefill_tokens_per_s: float
    pending_prefill_s: float = 0.0  # prefill work of requests already submitted
    ready_in_s: float = 0.0  # rest of the activation; 0 when active
    # Tokens that fit into the device's free memory, which all its engines share.
    shared_tokens: int = 0
    token_bytes: int = 1
    quantum_tokens: int = 1  # granularity in which an engine takes shared memory
    # Part of available_tokens that no other engine can take: the unused rest of its minimum.
    guaranteed_tokens: int = 0
    limit_tokens: int | None = None  # shared tokens that its own limit allows; None: unlimited
    on_trial: bool = False  # a suspect runs there (see `Waiting`): nothing else may start
    # See RequestNeed.
    window_tokens: int = 0
    window_share: float = 0.0
    state_tokens: int = 0

    @property
    def own_tokens(self) -> int:
        """Part of available_tokens that is free for this engine alone."""
        shared, limit = self.shared_tokens, self.limit_tokens
        return self.available_tokens - (shared if limit is None else min(shared, limit))


@dataclass(frozen=True, slots=True)
class AdmissionOrder:
    """Order in which waiting requests start."""

    # Largest set that meets its deadlines: highest priority first, then earliest deadline.
    on_time: tuple[Waiting, ...]
    # The rest, oldest first. They start after the others of their priority and are never dropped.
    late: tuple[Waiting, ...]


Order = Callable[[Sequence[Waiting], Mapping[str, EngineView], float, float], AdmissionOrder]
"""Orders the requests of a device.

Args:
    requests: waiting requests of models in `engines`.
    engines: model -> its engine.
    now_s: current time.
    busy_s: time of prefill work in progress, before which no request can start.
"""


class Degree(msgspec.Struct, frozen=True):
    """Model at one tensor-parallel degree. Sizes are summed over its devices."""

    # Includes the engines' shares, as in ModelView.
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    # Speed of prefills without other models on the devices; 0: not known.
    prefill_tokens_per_s: float = 0.0
    # A decode step of n requests takes step_s + n x request_s.
    step_s: float = 0.0
    request_s: float = 0.0


class Traffic(msgspec.Struct, frozen=True):
    """Requests of the last ten minutes (`prism/scheduler/traffic.py`). Lengths are in tokens."""

    requests: int = 0
    # Arrivals per second in the last minute, in the busiest ten seconds, and in all of the time.
    rate_rps: float = 0.0
    peak_rps: float = 0.0
    mean_rps: float = 0.0
    # Means, standard deviations and the 99th percentile. Outputs are those of ended requests.
    prompt_tokens: float = 0.0
    prompt_std_tokens: float = 0.0
    prompt_p99_tokens: float = 0.0
    output_tokens: float = 0.0
    output_std_tokens: float = 0.0
    # Part of the time with requests: of the intervals of ten seconds, those in which any arrived.
    busy_part: float = 0.0
    # The latest 32 times without arrivals that ended, oldest first, also those before the last ten
    # minutes. Known in steps of ten seconds: shorter ones are missing.
    idle_times_s: tuple[float, ...] = ()


NO_TRAFFIC = Traffic()


class ModelView(msgspec.Struct, frozen=True):
    """Model as the cluster scheduler sees it.

    A model with several replicas has one view per replica, all with the same name. Sizes are of the
    whole model; each of its `tp` devices holds a part.
    """

    name: str
    # Includes the engine's non-elastic share.
    weight_bytes: int
    token_bytes: int
    # KV memory that the model needs to serve at all.
    kv_floor_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    # Prompt tokens of admitted requests plus decoded tokens, per second over the rate window.
    token_rate: float = 0.0
    waiting: int = 0
    running: int = 0
    # Seconds since its last request ended or arrived.
    idle_s: float = float("inf")
    # Seconds until it has been active for as long as its last activation took.
    owes_s: float = 0.0
    # Device of rank 0; `peers` has the other ranks in order.
    device: str | None = None
    # "absent", "activating", "active", "draining", or "migrating" (serves on `device` while it is
    # activated on another one).
    state: str = "absent"
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    # True if it should be resident although no request waits (initial placement, device lost).
    wanted: bool = False
    # True if it was wanted, but refused. It may be activated where memory is to spare.
    deferred: bool = False
    # Devices where its activation failed recently and is not retried yet.
    barred: tuple[str, ...] = ()
    # Tensor-parallel degree of the copy; of an absent model the least one that it may have.
    tp: int = 1
    # Degrees that the policy may choose, `tp` included.
    degrees: Mapping[int, Degree] = msgspec.field(default_factory=dict)
    peers: tuple[str, ...] = ()
    # Device -> estimated seconds until it can serve there; empty: not known.
    startup_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    # The engine's part of weight_bytes on each device, the same at any degree; 0 if the model
    # runs at this degree only.
    share_bytes: int = 0
    # Target devices of a "migrating" copy, rank 0 first.
    moving_to: tuple[str, ...] = ()
    # Limits on the number of copies; the policy chooses their devices.
    replicas_min: int = 1
    replicas_max: int = 1
    # Waiting time of this copy's oldest waiting request.
    oldest_wait_s: float = 0.0
    # Duration of its last activation; 0: not known.
    load_s: float = 0.0
    # Token rate of a copy when one of the model was last saturated; 0: never.
    saturated_rate: float = 0.0
    # Requests of this copy; of an absent model all of them.
    traffic: Traffic = NO_TRAFFIC
    # Mean rate and mean lengths that are expected before the first request, the same in all views.
    expected: Traffic = NO_TRAFFIC


class GpuView(msgspec.Struct, frozen=True):
    """Device as the cluster scheduler sees it."""

    name: str
    capacity_bytes: int
    # Memory in use, but not by the models in `ClusterView.models`.
    fixed_bytes: int = 0
    # Capacity minus everything reserved now (weights, floors, KV), but for unused cached prefixes.
    free_bytes: int = 0
    # Number of engines that can take a model now.
    engines_free: int = 0
    engines_total: int = 0
    # True if models can be activated on it: its agent answers, and it is not drained.
    alive: bool = True
    # True if models must leave it.
    drained: bool = False
    # Devices of one node have fast links. A tensor-parallel model stays within one.
    node: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Input of a policy's plan."""

    now_s: float
    models: tuple[ModelView, ...]
    gpus: tuple[GpuView, ...]
    # True if the scheduling interval has passed, so that models may be moved (§6.2).
    rebalance: bool = True
    # Latest result of the policy's placement search, if it has one.
    target: Placement | None = None
    # Virtual queues of the devices, for policies that assign requests.
    queues: tuple[VirtualQueue, ...] = ()
    # Turns of the instances, for policies that switch models between tokens.
    turns: tuple[InstanceTurn, ...] = ()
    # Model -> number of requests that are not bound to a device, for policies that bind them.
    unbound: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of cluster policies."""

    # Models idle for longer may be evicted when memory is short (§6.2).
    idle_threshold_s: float = 45.0
    # Tau of Algorithm 1: the relative gain in KVPR that justifies a move.
    migration_threshold: float = 0.2
    # No model leaves a device for balance if fewer requests contend there (`contending`), or if
    # fewer wait while memory is not short. Tau alone would cause useless moves: it is relative, so
    # at low load a single request can exceed it, and rates are of the past. 0: every move of
    # Algorithm 1 that has room.
    contended_requests: float = 4.0
    # Shortest idle time after which a model may be evicted for a waiting request that cannot be
    # served otherwise.
    min_idle_s: float = 1.0
    # Fraction of free memory below which a device is short of memory.
    short_fraction: float = 0.05
    # See `Migrate`.
    move_running: bool = False


class DeviceLoad(msgspec.Struct, frozen=True):
    """Load of a device, from which `Policy.is_balanced` decides."""

    # Number of contending requests (`contending`).
    contending: float
    # Fraction of its memory that is free.
    free_part: float
    # True if the degree of a model on it, or its number of copies, may change.
    unsettled: bool = False


def contending(running: Collection[float]) -> float:
    """Returns the number of requests that contend with the busiest model's on a device.

    The busiest model is excluded, since a model alone on a device cannot gain by a move.

    Args:
        running: For each model, token rate x TPOT SLO: the requests running at a time if each is
            served at its SLO's rate (Little's law).
    """
    return sum(running) - max(running) if len(running) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Activate:
    """Activates the model, at the tensor-parallel degree of the number of its devices."""

    model: str
    device: str
    reason: str
    # Limit on its KV memory per device.
    kv_limit_bytes: int | None = None
    # Devices of ranks 1 and up of a tensor-parallel model.
    peers: tuple[str, ...] = ()
    # True if another copy serves the model: requests are routed here only once this one is active.
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """Evicts the model from its devices."""

    model: str
    # Device of rank 0; the other ranks are evicted with it.
    device: str
    reason: str
    # True: running requests resume on another copy of the model, or wait for one. False: they
    # finish first. Without another copy the live system lets them finish.
    move_running: bool = False


@dataclass(frozen=True, slots=True)
class Migrate:
    """Activates the model on the target, then evicts it from the source.

    The degree there is that of the number of target devices.
    """

    model: str
    source: str  # of rank 0
    target: str  # of rank 0
    reason: str
    # Target devices of the other ranks.
    peers: tuple[str, ...] = ()
    # True: running requests resume on the target. False: they finish on the source.
    move_running: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reports that the model cannot be placed now.

    `reason` says how many bytes are missing and on which device.
    """

    model: str
    reason: str
    # True: the devices are overloaded, and the model is worth less than those that they serve. Its
    # requests are rejected at once.
    overload: bool = False


Action = Activate | Evict | Migrate | Refuse
