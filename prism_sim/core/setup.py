"""What a simulation runs on, fully resolved: plain frozen data in bytes, tokens and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prism.policies.data import Settings
from prism.policies.knobs import Knobs
from prism.policies.kv_blocks import KvShape
from prism.scheduler.local import Limits
from prism_sim.costs.model import CostModel

UNBOUNDED_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How engines run."""

    max_running: int = 256
    # Prompt tokens of one step.
    prefill_chunk_tokens: int = 8192
    # A step holds prompt chunks and decodes (Sarathi) instead of one of the two.
    mixed_chunk: bool = False
    # Output tokens that must fit besides before a retracted request comes back.
    headroom_tokens: int = 64
    # Decode steps advanced at once.
    run_steps: int = UNBOUNDED_STEPS
    # Blocks of prompts are kept for later requests that begin with them.
    prefix_reuse: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """One GPU."""

    name: str
    # Devices of one node have fast links among themselves.
    node: str
    capacity_bytes: int
    page_bytes: int
    # How many models it may hold at a time.
    engines: int
    # Devices with the same one compute on it together, as host devices do on their machine's cores.
    # Empty: it has its own.
    processor: str = ""


@dataclass(frozen=True, slots=True)
class DegreeSetup:
    """A model at one tensor-parallel degree."""

    cost: CostModel
    # The KV of so many blocks takes quantum_bytes on each of its devices.
    quantum_blocks: int
    quantum_bytes: int
    # Of one device's part, for pools of KV blocks.
    shape: KvShape


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model. Sizes are of the whole model, one part in `tp` on each of its devices."""

    index: int
    name: str
    # The degree it runs at unless a placement says otherwise.
    tp: int
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    block_tokens: int
    slo_ttft_s: float
    slo_tpot_s: float
    # Degree -> what depends on it; `tp` is in it.
    parts: Mapping[int, DegreeSetup]
    prefill_tokens_per_s: float
    # What its engine holds besides on each device, at any degree.
    share_bytes: int = 0
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    # How many copies it may have.
    replicas_min: int = 1
    replicas_max: int = 1
    # As measured, in place of what `ActivationSettings` would give.
    activation_s: float | None = None
    # Of the first plan's activation, where that is known.
    first_activation_s: float | None = None
    # From a request's arrival to its device's queue.
    request_s: float = 0.0
    # From its dispatch until its engine may start it.
    submit_s: float = 0.0
    # Of prefills, as admission reckons with it until a device has measured it. Default: that of
    # whole chunks.
    speed_tokens_per_s: float | None = None

    def held_bytes(self, tp: int) -> int:
        """Weights and engines' shares on `tp` devices together."""
        return self.weight_bytes + self.share_bytes * tp

    def static_bytes(self, tp: int) -> int:
        """Weights and the engine's share on one of `tp` devices."""
        return -(-self.weight_bytes // tp) + self.share_bytes

    def floor_bytes(self, tp: int) -> int:
        """KV floor on one of `tp` devices."""
        return -(-self.kv_floor_bytes // tp)


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """How long a model takes to come up (Prism §5.2, Figure 9)."""

    # Laying out the virtual space in a pooled engine.
    layout_s: float = 0.03
    # A new engine process, for policies that restart engines.
    restart_s: float = 15.0
    # One GPU's share of a parallel load from host memory.
    load_bytes_s: float = 23e9
    # All GPUs of a node together.
    node_load_bytes_s: float = 95e9
    # The load of a restarted engine.
    plain_load_bytes_s: float = 4e9
    # Weights from another GPU of the node.
    peer_bytes_s: float = 400e9
    # Between nodes.
    network_bytes_s: float = 12.5e9
    # Weights that each node keeps in host memory, and reads from its disk. None: the disk has no
    # part in it.
    host_store_bytes: int | None = None
    disk_bytes_s: float = 2e9
    # Every node holds all weights in host memory. False: each model's lie on one node.
    weights_everywhere: bool = True
    # Until the memory of an evicted model is free.
    unload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """The whole cluster and how it is run."""

    devices: tuple[DeviceSetup, ...]
    models: tuple[ModelSetup, ...]
    policy: str = "prism"
    settings: Settings = field(default_factory=Settings)
    limits: Limits = field(default_factory=Limits)
    engine: EngineSettings = field(default_factory=EngineSettings)
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    # Of the cluster scheduler.
    interval_s: float = 5.0
    # It looks at least as often while requests wait for a model that is placed nowhere.
    retry_s: float = 0.5
    rate_window_s: float = 60.0
    # All that the first plan activates is up at once.
    warm: bool = True
    # An activation that finds no memory for so long fails.
    activation_timeout_s: float = 60.0
    # The device of a failed activation is not tried again for so long.
    bar_s: float = 5.0
    # On how many requests a placement is tried: the tuning budget of every policy that has a
    # simulator inside.
    search_requests: int = 600
    # See `search.expected`.
    search_rates: str = "mean"
    # Of single policies.
    knobs: Knobs = field(default_factory=Knobs)
    # Requests that still wait so long after the last arrival are given up.
    patience_s: float = 600.0
    # Until a policy whose placement is searched anew does so first.
    replacement_interval_s: float = 300.0
