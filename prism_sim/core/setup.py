"""Resolved input of a simulation: plain frozen data in bytes, tokens and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prism.errors import KV_MEMORY_EXCEEDED, ContextLengthError
from prism.policies.data import Settings, request_kv_tokens, side_kv_tokens
from prism.policies.knobs import Knobs
from prism.policies.multiplexing.kv_blocks import KvShape
from prism.scheduler.local_scheduler import Limits
from prism_sim.costs.model import CostModel

UNBOUNDED_STEPS = 1 << 40
UNLIMITED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of all engines."""

    max_running: int = 256
    # Maximum number of prompt tokens in one step.
    prefill_chunk_tokens: int = 8192
    # True if a step may combine prompt chunks and decodes (Sarathi).
    mixed_chunk: bool = False
    # True if an engine also computes one step at a time under step control. False: a prefill and
    # decode steps of a model run at the same time (MuxServe §3.3).
    serial_phases: bool = False
    # Output tokens that must fit in addition before a retracted request is readmitted.
    headroom_tokens: int = 64
    # Maximum number of decode steps in one event.
    run_steps: int = UNBOUNDED_STEPS
    # True if engines cache prompt prefixes.
    prefix_reuse: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """One GPU."""

    name: str
    # Devices of one node have fast links between them.
    node: str
    capacity_bytes: int
    page_bytes: int
    # Maximum number of models at a time.
    engines: int
    # Name of a processor shared by several devices, such as the cores of a machine for its host
    # devices. Empty: the device has its own.
    processor: str = ""


@dataclass(frozen=True, slots=True)
class KvNeed:
    """KV that requests take of an engine (`RequestNeed`), counted in blocks of its main pool."""

    block_tokens: int
    window_tokens: int = 0
    window_share: float = 0.0
    state_tokens: int = 0

    @property
    def is_plain(self) -> bool:
        """True if the main pool is the only one."""
        return not (self.window_tokens or self.state_tokens)

    def blocks(self, tokens: int) -> int:
        """Returns the blocks of a request, in all pools."""
        return -(-request_kv_tokens(self, tokens) // self.block_tokens)

    @property
    def step_blocks(self) -> int:
        """Maximum number of blocks that a running request takes in one step. It has its state."""
        return replace(self, state_tokens=0).blocks(1)

    def held_tokens(self, tokens: float) -> float:
        """Returns the size of the KV of a request of `tokens`, in all pools."""
        return tokens + side_kv_tokens(self, tokens)


@dataclass(frozen=True, slots=True)
class DegreeSetup:
    """Model at one tensor-parallel degree."""

    cost: CostModel
    # Number of KV blocks in one quantum.
    quantum_blocks: int
    # Size of one quantum on each device.
    quantum_bytes: int
    # KV shape on one device, for shared pools of KV blocks. None: layers keep different KV.
    shape: KvShape | None


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Model. Sizes are of the whole model; each of its devices holds 1/tp."""

    index: int
    name: str
    # Tensor-parallel degree, unless a placement or the policy sets another one.
    tp: int
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    need: KvNeed
    slo_ttft_s: float
    slo_tpot_s: float
    # Supported tensor-parallel degrees, including `tp`.
    parts: Mapping[int, DegreeSetup]
    prefill_tokens_per_s: float
    # Memory of its engine on each device in addition to weights and KV, at any degree.
    share_bytes: int = 0
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    # Bounds of the number of copies.
    replicas_min: int = 1
    replicas_max: int = 1
    # Degrees that the policy may choose; empty: only `tp`.
    degrees: tuple[int, ...] = ()
    # Maximum number of tokens of a prompt and its output.
    context_tokens: int = UNLIMITED_TOKENS
    # Maximum number of tokens whose KV fits on its devices at `tp`.
    kv_tokens: int = UNLIMITED_TOKENS
    # Measured activation time; replaces the one computed from `ActivationSettings`.
    activation_s: float | None = None
    # Measured time of the first plan's activation, if known.
    first_activation_s: float | None = None
    # Time from a request's arrival to its device's queue.
    request_s: float = 0.0
    # Time from a request's dispatch until its engine may start it.
    submit_s: float = 0.0
    # Prefill speed that admission assumes until a device has measured it. Default: the speed of
    # whole chunks.
    speed_tokens_per_s: float | None = None

    def refusal(self, tokens: int) -> str | None:
        """Returns the error code of a request that its engine can never serve, or None.

        tokens: Its prompt and its output. The live frontend answers the same code for a prompt that
        exceeds the context together with max_tokens.
        """
        if tokens > self.context_tokens:
            return ContextLengthError.code
        return KV_MEMORY_EXCEEDED if tokens > self.kv_tokens else None

    def held_bytes(self, tp: int) -> int:
        """Returns the weights and the engine's share, summed over `tp` devices."""
        return self.weight_bytes + self.share_bytes * tp

    def static_bytes(self, tp: int) -> int:
        """Returns the weights and the engine's share on one of `tp` devices."""
        return -(-self.weight_bytes // tp) + self.share_bytes

    def floor_bytes(self, tp: int) -> int:
        """Returns the KV floor on one of `tp` devices."""
        return -(-self.kv_floor_bytes // tp)

    def measured_s(self, now_s: float) -> float | None:
        """Returns the measured time of an activation that starts at `now_s`, if known."""
        if self.first_activation_s is not None and now_s == 0.0:
            return self.first_activation_s
        return self.activation_s


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """Times and rates of model activation (Prism §5.2, Figure 9)."""

    # Time to lay out the virtual space in a pooled engine.
    layout_s: float = 0.03
    # Start of a new engine process, for policies that restart engines.
    restart_s: float = 15.0
    # Rate of one GPU in a parallel load from host memory.
    load_bytes_s: float = 23e9
    # Rate of all GPUs of a node together.
    node_load_bytes_s: float = 95e9
    # Load rate of a restarted engine.
    plain_load_bytes_s: float = 4e9
    # Rate between two GPUs of a node.
    peer_bytes_s: float = 400e9
    # Rate between nodes.
    network_bytes_s: float = 12.5e9
    # Host memory for weights on each node; other weights are read from the node's disk. None: host
    # memory is unlimited and the disk is not used.
    host_store_bytes: int | None = None
    disk_bytes_s: float = 2e9
    # True if every node has all weights in host memory; otherwise each model is stored on one node.
    weights_everywhere: bool = True
    # Time until the memory of an evicted model is free.
    unload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """Cluster and its settings."""

    devices: tuple[DeviceSetup, ...]
    models: tuple[ModelSetup, ...]
    policy: str = "prism"
    settings: Settings = field(default_factory=Settings)
    limits: Limits = field(default_factory=Limits)
    engine: EngineSettings = field(default_factory=EngineSettings)
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    # Interval of the cluster scheduler.
    interval_s: float = 5.0
    # Interval of the cluster scheduler while requests wait for a model without a copy.
    retry_s: float = 0.5
    rate_window_s: float = 60.0
    # True if activations of the first plan take no time.
    warm: bool = True
    # An activation that gets no memory within this time fails.
    activation_timeout_s: float = 60.0
    # Time for which the device of a failed activation is not tried again.
    bar_s: float = 5.0
    # Number of requests on which a placement is tried: the tuning budget of every policy with a
    # simulator inside.
    search_requests: int = 600
    # Rates for placement search; see `search.expected`.
    search_rates: str = "mean"
    # Settings of single policies.
    knobs: Knobs = field(default_factory=Knobs)
    # Requests that still wait this long after the last arrival fail with `unserved`.
    patience_s: float = 600.0
    # Time until the first new placement, for policies that search again; infinity: never.
    search_interval_s: float = 300.0
