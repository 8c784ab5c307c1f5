"""What a simulation runs on, fully resolved: plain frozen data in bytes, tokens and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prism.costs.model import CostModel
from prism.policies.data import Settings
from prism.policies.knobs import Knobs
from prism.policies.kv_blocks import KvShape
from prism.scheduler.local import Limits

UNBOUNDED_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """prefill_chunk_tokens: prompt tokens of one step. mixed_chunk: a step holds prompt chunks and
    decodes (Sarathi) instead of one of the two. headroom_tokens: output tokens that must fit
    besides for a retracted request to come back. run_steps: decode steps advanced at once.
    prefix_reuse: blocks of prompts are kept for later requests that begin with them."""

    max_running: int = 256
    prefill_chunk_tokens: int = 8192
    mixed_chunk: bool = False
    headroom_tokens: int = 64
    run_steps: int = UNBOUNDED_STEPS
    prefix_reuse: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """One GPU. engines: how many models it may hold at a time. Devices of one node have fast
    links among themselves. processor: devices with the same one compute on it together, as host
    devices do on their machine's cores; empty: it has its own."""

    name: str
    node: str
    capacity_bytes: int
    page_bytes: int
    engines: int
    processor: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A model at one tensor-parallel degree: its step costs; the KV of quantum_blocks blocks takes
    quantum_bytes on each of its devices. shape: of one device's part, for pools of KV blocks."""

    cost: CostModel
    quantum_blocks: int
    quantum_bytes: int
    shape: KvShape


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model. weight_bytes, token_bytes and kv_floor_bytes are of the whole model, one part in
    `tp` on each of its devices; share_bytes: what its engine holds besides on each of them, at
    whatever degree. tp: the degree it runs at unless a placement says otherwise. parts: degree ->
    what depends on it; `tp` is in it. activation_s: as measured, in place of what
    `ActivationSettings` would give. request_s: from a request's arrival to its device's queue;
    submit_s: from its dispatch until its engine may start it. speed_tokens_per_s: of prefills, as
    admission reckons with it until a device has measured it; default that of whole chunks."""

    index: int
    name: str
    tp: int
    weight_bytes: int
    token_bytes: int
    kv_floor_bytes: int
    block_tokens: int
    slo_ttft_s: float
    slo_tpot_s: float
    parts: Mapping[int, Part]
    prefill_tokens_per_s: float
    share_bytes: int = 0
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    activation_s: float | None = None
    request_s: float = 0.0
    submit_s: float = 0.0
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
    """How long a model takes to come up (Prism §5.2, Figure 9).

    layout_s: laying out the virtual space in a pooled engine; restart_s: a new engine process, for
    policies that restart engines. load_bytes_s: one GPU's share of a parallel load from host
    memory; node_load_bytes_s: all GPUs of a node together; plain_load_bytes_s: the load of a
    restarted engine. peer_bytes_s: weights from another GPU of the node; network_bytes_s: between
    nodes. weights_everywhere: every node holds all weights in host memory; else each model's lie
    on one node. unload_s: until the memory of an evicted model is free.
    """

    layout_s: float = 0.03
    restart_s: float = 15.0
    load_bytes_s: float = 23e9
    node_load_bytes_s: float = 95e9
    plain_load_bytes_s: float = 4e9
    peer_bytes_s: float = 400e9
    network_bytes_s: float = 12.5e9
    weights_everywhere: bool = True
    unload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """The whole cluster and how it is run.

    interval_s: of the cluster scheduler; retry_s: while requests wait for a model that is placed
    nowhere, it looks at least as often. warm: all that the first plan activates is up at once.
    activation_timeout_s: an activation that finds no memory for so long fails; bar_s: its device
    is then not tried again for so long. search_requests: what a placement is tried on, the tuning
    budget of every policy that has a simulator inside, together with what the searches bound.
    search_rates: see `search.expected`. knobs: of single policies.
    patience_s: after the last arrival, requests that still wait are given up after this.
    replacement_interval_s: until a policy whose placement is searched anew does so first.
    """

    devices: tuple[DeviceSetup, ...]
    models: tuple[ModelSetup, ...]
    policy: str = "prism"
    settings: Settings = field(default_factory=Settings)
    limits: Limits = field(default_factory=Limits)
    engine: EngineSettings = field(default_factory=EngineSettings)
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    interval_s: float = 5.0
    retry_s: float = 0.5
    rate_window_s: float = 60.0
    warm: bool = True
    activation_timeout_s: float = 60.0
    bar_s: float = 5.0
    search_requests: int = 600
    search_rates: str = "mean"
    knobs: Knobs = field(default_factory=Knobs)
    patience_s: float = 600.0
    replacement_interval_s: float = 300.0
