"""The user's YAML and the resolved configuration that every process reads.

`prism-serve` parses and checks the YAML once (`load`), builds `ClusterConfig` and writes it as
JSON (mode 0600) into the run directory; child processes read that file (`resolved.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prism.config.access import AccessYaml, ApiKey
from prism.config.endpoints import Endpoints, local_name, node_of
from prism.config.journal import JournalYaml
from prism.config.lora import LoraConfig, LoraYaml
from prism.config.machines import DeviceYaml, NodeYaml, Strict, is_gpu
from prism.config.priority import PriorityConfig
from prism.config.replicas import ReplicasYaml
from prism.config.slo import ModelSloYaml
from prism.config.units import Bytes, Seconds
from prism.messages.models import ModelSpec
from prism.policies.data import Settings
from prism.scheduler.journal import JournalConfig

AUTO_STORE = "auto"  # a weight store of the cluster's own, which ends with it
_POLICY = Settings()
_HOST_STATIC_BYTES, _GPU_STATIC_BYTES = 16 << 20, 2 << 30
_HANG_TIMEOUT = Seconds("30s")


class ModelYaml(Strict, frozen=True):
    """One model."""

    # What a request calls the model.
    name: str
    # The folder with config.json, the tokenizer and the safetensors files. Relative paths start at
    # the YAML's folder.
    path: str
    # Requests without an SLO of their own get this one.
    slo: ModelSloYaml = ModelSloYaml()
    # The most tokens of a prompt and its answer. Default, and the most: what config.json has.
    context_length: int | None = None
    # "auto" is float32 on host devices and the files' own type on GPUs.
    dtype: str = "auto"
    # The engine adapter that serves the model. Default: engine.adapter.
    adapter: str | None = None
    # Whether the model keeps its place while it is idle.
    never_evict: bool = False
    # The only device that may serve the model. Default: the scheduler chooses.
    device: str | None = None
    # This model's fraction of its device's KV memory under the static policy. Default: an equal
    # part of what the other models leave.
    static_share: float | None = None
    # Over how many devices the model is spread (tensor parallel). The scheduler chooses which.
    tp: int = 1
    # The parser of its tool calls, by SGLang's name; "auto" goes by the chat template; or "none".
    tool_parser: str = "auto"
    # The same for its reasoning ("qwen3", "deepseek-r1", ...).
    reasoning_parser: str = "auto"
    replicas: ReplicasYaml = ReplicasYaml()
    # Whether the model makes vectors (/v1/embeddings) instead of text. Default: whether its files
    # have the modules.json of sentence-transformers.
    embeddings: bool | None = None
    # Other names that requests may call it by.
    aliases: list[str] = []
    # Its LoRA adapters, which a reload may not change.
    lora: list[LoraYaml] = []


class FrontendConfig(
    Strict,
    frozen=True,
    rename={
        "progress_timeout_s": "progress_timeout",
        "queue_timeout_s": "queue_timeout",
        "refused_timeout_s": "refused_timeout",
    },
):
    """The HTTP endpoint."""

    # The address to listen on.
    host: str = "127.0.0.1"
    # The port to listen on. 0 takes any free one.
    port: int = 8000
    # Where /status, /metrics and /dashboard are instead of at this port: another HOST:PORT, or the
    # path of a Unix socket for this user alone. Relative paths start at this file's folder.
    admin: str = ""
    # Whether the frontend's log has a line of JSON for each request.
    access_log: bool = True
    # Web pages of these origins ("*": all) may use the API in a browser (CORS).
    cors_origins: list[str] = []
    # A file in PEM format, beside the YAML: with it and its key the endpoint speaks HTTPS.
    tls_certificate: str | None = None
    # The certificate's private key, in PEM format.
    tls_key: str | None = None
    # How many processes serve the port: 1 to 16. More than one pays where one process has no CPU
    # left: see docs/operating.md.
    processes: int = 1
    # With so many requests open, new ones get status 429. Half of it is kept in equal parts for
    # each model, so one model alone gets at most the other half and its own part. Each process has
    # an equal part of all this.
    max_open_requests: int = 4096
    # Whether new requests for a model get status 429 while others wait beyond their TTFT SLO.
    # Otherwise they are served late.
    shed: bool = False
    priority: PriorityConfig = PriorityConfig()
    # A request that receives no token for this long ends with an error.
    progress_timeout_s: Seconds = Seconds("10m")
    # While Redis takes no requests, they wait for so long; then they end with status 503.
    queue_timeout_s: Seconds = Seconds("60s")
    # A request whose model has no place for this long ends with status 503 and the scheduler's
    # reason.
    refused_timeout_s: Seconds = Seconds("60s")
    # Where OpenTelemetry traces of requests go, over OTLP in HTTP: http://127.0.0.1:4318/v1/traces,
    # say. Empty: none are made. Needs the extra `traces`: pip install 'prism-serving[traces]'.
    traces: str = ""


ADAPTERS = ("sglang", "vllm", "fake")
CUDA_GRAPHS = ("lazy", "off")
ATTENTION_BACKENDS = ("triton", "flashinfer", "fa3", "fa4", "trtllm_mha", "torch_native")
MIGRATE_RUNNING = ("finish", "move")


class SchedulerConfig(
    Strict,
    frozen=True,
    rename={
        "interval_s": "interval",
        "idle_threshold_s": "idle_threshold",
        "min_idle_s": "min_idle",
        "rate_window_s": "rate_window",
    },
):
    """The cluster scheduler: which model is where."""

    # How often the scheduler plans when nothing happens.
    interval_s: Seconds = Seconds("5s")
    # When memory is short, models that were idle for longer are evicted first (Prism, section 6.2).
    idle_threshold_s: Seconds = Seconds(_POLICY.idle_threshold_s)
    # A model that was idle for less is never evicted.
    min_idle_s: Seconds = Seconds(_POLICY.min_idle_s)
    # A model moves only if KVPR falls by more than this fraction (tau of Algorithm 1).
    migration_threshold: float = _POLICY.migration_threshold
    # A device is relieved only if its models beside the busiest one run this many requests at a
    # time at their SLO's pace (token rate x TPOT SLO), and if as many requests wait there or less
    # than a quarter of its memory is free. 0: every move of Algorithm 1 that has room.
    contended_requests: float = _POLICY.contended_requests
    # Token rates are means over this time.
    rate_window_s: Seconds = Seconds("60s")
    # What happens to running requests when their model moves: "finish" leaves them where they are
    # (for at most engine.drain_timeout), "move" takes them to the target with their KV. To another
    # machine that is sent, or computed again there if that takes less time: see
    # nodes[].network_rate.
    migrate_running: str = "finish"

    @property
    def move_running(self) -> bool:
        return self.migrate_running == "move"

    def settings(self) -> Settings:
        """What the policy is tuned with."""
        return Settings(
            idle_threshold_s=float(self.idle_threshold_s),
            min_idle_s=float(self.min_idle_s),
            migration_threshold=self.migration_threshold,
            contended_requests=self.contended_requests,
            move_running=self.move_running,
        )


class EngineConfig(
    Strict,
    frozen=True,
    rename={
        "static_bytes": "static",
        "memory_slack_bytes": "memory_slack",
        "drain_timeout_s": "drain_timeout",
        "activation_timeout_s": "activation_timeout",
        "weight_store_bytes": "weight_store_max",
        "load_bytes_per_s": "load_rate",
        "link_bytes": "link_memory",
        "links_from_bytes": "links_from",
    },
):
    """The engine processes of all devices."""

    # "sglang"; "vllm", on host devices; or "fake": no model, answers known beforehand, for tests.
    adapter: str = "sglang"
    # Adapter -> the Python interpreter of its engines, where they have an environment of their own,
    # with prism-serving in it. Relative paths start at this file's folder.
    python: dict[str, str] = {}
    # The most requests that an engine runs at a time.
    max_running: int = 16
    # What an engine with a model may hold beside weights and KV. On a GPU that is the CUDA context,
    # torch's memory, graphs, workspaces and NCCL. Default: 2GiB on a GPU, 16MiB on a host device.
    static_bytes: Bytes | None = None
    # How much more than its leases an engine may hold on a GPU before it is replaced.
    memory_slack_bytes: Bytes = Bytes("256MiB")
    lora: LoraConfig = LoraConfig()
    # The most prompt tokens that one step computes.
    prefill_chunk_tokens: int = 512
    # How long an eviction, a move or a shutdown waits for running requests.
    drain_timeout_s: Seconds = Seconds("30s")
    # How long an engine may load a model, or a model may wait for an engine and for memory, before
    # the activation has failed.
    activation_timeout_s: Seconds = Seconds("150s")
    # "per_layer" has the fastest attention. "token_interleaved" grows in the finest steps. "auto"
    # takes the finer one where growth per layer, times the models that may share the device,
    # exceeds a few percent of it. Models with tp stay per layer.
    kv_layout: str = "per_layer"
    # Where the machine keeps weights ready to be copied: "auto" is a folder in /dev/shm that ends
    # with the cluster, "off" is nowhere. Or a folder, which clusters may share.
    weight_store: str = AUTO_STORE
    # The most that the weight store holds. Default: 80 % of its file system.
    weight_store_bytes: Bytes | None = None
    # The most bytes per second that an activation copies, over all links together, for the sake of
    # models that decode beside it, such as "8GB". Default: no bound.
    load_bytes_per_s: Bytes | None = None
    # Over which GPUs' links to the host an engine loads weights: of all GPUs here ("node") or its
    # "own" alone.
    weight_links: str = "node"
    # What a load may take on each other GPU for its link, while nothing there is short of memory:
    # staging buffers of 32MiB and the engine's CUDA context.
    link_bytes: Bytes = Bytes("512MiB")
    # Smaller loads use no other GPU's link.
    links_from_bytes: Bytes = Bytes("2GiB")
    # Start NVIDIA's Multi-Process Service, so that the engines of a GPU compute at the same time.
    mps: bool = False
    # "lazy" captures graphs of decode steps once a model has answered, when its engine is idle or
    # has been busy for long. "off" captures none.
    cuda_graphs: str = "lazy"
    # SGLang's name of the attention kernels on GPUs. Default: SGLang's choice, or "triton" where
    # SGLang's kernels are not installed.
    attention_backend: str | None = None

    def static_on(self, device: str) -> int:
        """Of an engine with a model on `device`."""
        if self.static_bytes is not None:
            return int(self.static_bytes)
        return _GPU_STATIC_BYTES if is_gpu(device) else _HOST_STATIC_BYTES


class ServeYaml(Strict, frozen=True, kw_only=True):
    """The whole file."""

    # The devices of this machine, at least one; with `nodes` these have the devices instead.
    devices: list[DeviceYaml] = []
    # At least one model.
    models: list[ModelYaml]
    # The machines, where there are several: see docs/several-machines.md.
    nodes: list[NodeYaml] = []
    # The Ray cluster that starts the machines: "auto" for the one of this machine, or for one that
    # is started where there is none; or HOST:PORT. Without `nodes` they are all of Ray's, also
    # those that join later, with a GPU or a prism_host_device; `devices` then describes each GPU
    # as "cuda:*" and each host device as "host:*". `cluster_key` is made then.
    ray: str | None = None
    # With `nodes`: a file, for this user alone, with the key by which their processes know each
    # other; `prism-serve new-cluster-key` makes it. Relative paths start at this file's folder.
    cluster_key: str | None = None
    # Where models go and which leave: "prism", "static" (fixed shares, nothing is evicted),
    # "serverlessllm" or "dedicated". `prism-sim policies` lists all, with what each needs.
    policy: str = "prism"
    # Policy -> what it is tuned with, for policies that other packages add.
    knobs: dict[str, dict[str, Any]] = {}
    # URL of a Redis-compatible server. On another machine it needs a password or TLS (rediss://).
    # Default: prism-serve starts its own, which it cannot with `nodes`.
    redis: str | None = None
    # A frontend, a scheduler, an agent, the bundled Redis, a process that keeps imports ready: one
    # that does not answer for this long is killed and started again. At least 15 s.
    hang_timeout: Seconds = _HANG_TIMEOUT
    frontend: FrontendConfig = FrontendConfig()
    access: AccessYaml = AccessYaml()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    journal: JournalYaml = JournalYaml()


# --- resolved -------------------------------------------------------------------------------


class DeviceConfig(msgspec.Struct, frozen=True):
    name: str
    capacity_bytes: int
    page_bytes: int
    engines: int
    # Of each engine under MPS; empty: 100.
    sm_percent: tuple[int, ...] = ()
    # Planned for each engine process on a GPU while it has no model: its CUDA context and the code
    # in it. The engine measures what it is and leases that.
    idle_bytes: int = 0

    @property
    def engines_bytes(self) -> int:
        """What the engine processes take without a model."""
        return self.engines * self.idle_bytes

    @property
    def models_bytes(self) -> int:
        """What is left for models."""
        return max(0, self.capacity_bytes - self.engines_bytes)

    @property
    def node(self) -> str:
        """Ranks of a model go to devices of one: of one machine and kind, with pages of one
        size."""
        return f"{self.name.partition(':')[0]} {self.page_bytes} {node_of(self.name)}".rstrip()


class ClusterConfig(Endpoints, frozen=True):
    redis_url: str
    policy: str
    devices: list[DeviceConfig]
    models: list[ModelSpec]
    knobs: dict[str, dict[str, Any]] = {}
    host: str = FrontendConfig().host
    port: int = FrontendConfig().port
    # HOST:PORT or an absolute path; empty where `port` serves the pages of operators, too.
    admin: str = FrontendConfig().admin
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    frontend: FrontendConfig = FrontendConfig()
    journal: JournalConfig = JournalConfig()
    keys: list[ApiKey] = []
    open_to_all: bool = False
    hang_timeout_s: float = float(_HANG_TIMEOUT)
    # Not in the YAML: only tests need another. How often an agent reports without a change.
    report_interval_s: float = 0.5
    # Likewise: see `DirectMoves`.
    kv_offer_s: float = 5.0
    kv_fetch_s: float = 2.0
    # Likewise: something listens at `preloaded_path` of each device.
    preloaded: bool = False
    # The user's YAML, and how often it was read again.
    source: str = ""
    revision: int = 0
    # Models that a reload has taken out of `models`: their requests end first.
    leaving: list[ModelSpec] = []
    # Those of `keys` that came in the environment of `prism-serve`, which is read once.
    variable_keys: list[ApiKey] = []

    def adapter_of(self, model: ModelSpec) -> str:
        """What its engines are."""
        return model.adapter or self.engine.adapter

    def adapters_on(self, device: str) -> tuple[str, ...]:
        """Those of models that may be there; the cluster's own first."""
        here = [m for m in self.models if m.pinned_device in (None, device)]
        found = {self.adapter_of(model) for model in here} or {self.engine.adapter}
        return tuple(sorted(found, key=lambda name: (name != self.engine.adapter, name)))

    def preloaded_name(self, device: str, adapter: str) -> str:
        """Of the process that keeps an adapter's imports ready."""
        suffix = "" if adapter == self.engine.adapter else f"-{adapter}"
        return f"preloaded-{device.replace(':', '')}{suffix}"

    def preloaded_path(self, device: str, adapter: str) -> Path:
        """That process's socket."""
        return Path(self.run_dir) / self.preloaded_name(device, adapter)

    @property
    def frontends_total(self) -> int:
        """In the whole cluster."""
        return sum(node.frontends for node in self.nodes) or self.frontend.processes

    @property
    def frontends_here(self) -> int:
        here = self.here
        return self.frontend.processes if here is None else here.frontends

    def local(self) -> ClusterConfig:
        """What this machine's engines and segments know of: its devices, by their names here."""
        if not self.node:
            return self
        own = [d for d in self.devices if node_of(d.name) == self.node]
        devices = [msgspec.structs.replace(d, name=local_name(d.name)) for d in own]
        namespace = f"{self.namespace}-{self.node}"
        return msgspec.structs.replace(self, devices=devices, namespace=namespace)

    def device_key(self, index: int) -> str:
        """What the YAML calls the device."""
        for number, node in enumerate(self.nodes):
            if index < node.devices:
                return f"nodes[{number}].devices[{index}]"
            index -= node.devices
        return f"devices[{index}]"

    def _index(self, device: str) -> int:
        beside = [d.name for d in self.devices if node_of(d.name) == node_of(device)]
        return beside.index(device)

    def device(self, name: str) -> DeviceConfig:
        return next(d for d in self.devices if d.name == name)

    def model(self, name: str) -> ModelSpec:
        return next(m for m in self.models if m.name == name)
