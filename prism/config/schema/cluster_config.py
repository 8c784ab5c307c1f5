"""The user's YAML and the resolved configuration that every process reads.

`prism-serve` parses and checks the YAML once (`load`), builds `ClusterConfig` and writes it as
JSON (mode 0600) into the run directory; child processes read that file (`resolved.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from prism.config.schema.access import AccessYaml, ApiKey
from prism.config.schema.endpoints import Endpoints, local_name, node_of
from prism.config.schema.expected import ExpectedYaml
from prism.config.schema.image_limits import ImagesConfig
from prism.config.schema.journal import JournalYaml
from prism.config.schema.lora import LoraConfig, LoraYaml
from prism.config.schema.machines import DeviceYaml, NodeYaml, Strict, is_gpu
from prism.config.schema.priority import PriorityConfig
from prism.config.schema.replicas import ReplicasYaml
from prism.config.schema.slo import ModelSloYaml
from prism.config.schema.units import Bytes, Seconds
from prism.messages.external import ExternalModel
from prism.messages.model_spec import ModelSpec
from prism.policies.data import Settings
from prism.scheduler.decision_journal import JournalConfig

AUTO_STORE = "auto"  # a private weight store, which ends with the cluster
_POLICY = Settings()
_HOST_STATIC_BYTES, _GPU_STATIC_BYTES = 16 << 20, 2 << 30
_HANG_TIMEOUT = Seconds("30s")


class ModelYaml(Strict, frozen=True):
    """One model."""

    # The model's name in requests.
    name: str
    # The folder with config.json, the tokenizer and the safetensors files, or a GGUF file. Relative
    # paths start at the YAML's folder. A model that is in no folder has its name in a hub here:
    # ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf. See docs/model-hubs.md. Required, but for
    # external models.
    path: str = ""
    # The SLO of requests that do not have one.
    slo: ModelSloYaml = ModelSloYaml()
    # Its expected traffic, for policies that place models before there is any (static, muxserve++).
    # Default: not known.
    expected: ExpectedYaml | None = None
    # The most tokens of a prompt and its answer. Default and maximum: the value of config.json.
    context_length: int | None = None
    # "auto" is float32 on host devices and the files' dtype on GPUs.
    dtype: str = "auto"
    # The type of the KV cache: "bf16", "fp8_e4m3" or "fp8_e5m2", of which the last two take half of
    # the memory of 16 bits. "auto" is the model's dtype, or the files' scheme of quantized KV.
    kv_cache_dtype: str = "auto"
    # The engine adapter that serves the model. Default: engine.adapter. "external": its own
    # `servers` do. External models come after all others, and have no other keys than name,
    # adapter, servers, server_key_variable, sleep_after, slo and aliases. See
    # docs/external-servers.md.
    adapter: str | None = None
    # URLs of OpenAI-compatible servers of an external model, such as http://127.0.0.1:30001.
    servers: list[str] = []
    # An environment variable with the API key of these servers. Default: they need none.
    server_key_variable: str = ""
    # The time without requests after which these servers are put to sleep, at least 1s. A request
    # wakes them. Default: never. All their requests must pass Prism. See docs/external-servers.md.
    sleep_after: Seconds | None = None
    # Whether the model stays on its device while it is idle.
    never_evict: bool = False
    # The only device that may serve the model. Default: the scheduler chooses.
    device: str | None = None
    # This model's fraction of its device's KV memory under the static policy. Default: an equal
    # part of what is left.
    static_share: float | None = None
    # The number of devices that the model is spread over (tensor parallel), which the scheduler
    # chooses. "auto": the least number at which it fits; the policy "prism" raises and lowers it by
    # the model's traffic and SLOs. Default: auto if all devices are GPUs, otherwise 1.
    tp: int | Literal["auto"] | None = None
    # The parser of its tool calls, by SGLang's name. "auto" detects it by the chat template. "none"
    # disables it.
    tool_parser: str = "auto"
    # The same for reasoning ("qwen3", "deepseek-r1", ...).
    reasoning_parser: str = "auto"
    replicas: ReplicasYaml = ReplicasYaml()
    # Whether the model makes vectors (/v1/embeddings) instead of text. Default: true if its files
    # include the modules.json of sentence-transformers.
    embeddings: bool | None = None
    # Whether it takes images. Default: true if its family does (docs/supported-models.md). Without
    # them, its vision tower is not loaded.
    images: bool | None = None
    # Other names that requests may use.
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
    # Another address for /status, /metrics and /dashboard: HOST:PORT, or the path of a Unix socket
    # for this user. Default: the port above. Relative paths start at this file's folder.
    admin: str = ""
    # Whether the frontend logs a line of JSON for each request.
    access_log: bool = True
    # Web pages of these origins ("*": all) may use the API in a browser (CORS).
    cors_origins: list[str] = []
    # A file in PEM format. With it and its key, the endpoint uses HTTPS. Relative paths start at
    # this file's folder.
    tls_certificate: str | None = None
    # The certificate's private key, in PEM format.
    tls_key: str | None = None
    # The number of processes that serve the port: 1 to 16. More than one helps if the CPU of one
    # process is saturated: see docs/operating.md.
    processes: int = 1
    # The most open requests; new ones then get status 429. Half of them are reserved in equal parts
    # for each model, so one model gets at most the other half and its part. Each process has an
    # equal part of these limits.
    max_open_requests: int = 4096
    # Whether new requests for a model get status 429 while others wait longer than their TTFT SLO.
    # Otherwise they are served late.
    shed: bool = False
    priority: PriorityConfig = PriorityConfig()
    # A request that receives no token for this long ends with an error.
    progress_timeout_s: Seconds = Seconds("10m")
    # While Redis is unavailable, requests wait for this long, then get status 503.
    queue_timeout_s: Seconds = Seconds("60s")
    # A request whose model cannot be placed for this long gets status 503 and the scheduler's
    # reason.
    refused_timeout_s: Seconds = Seconds("60s")
    # The address of a collector for OpenTelemetry traces of requests (OTLP over HTTP), such as
    # http://127.0.0.1:4318/v1/traces. Empty: no traces. Needs the extra `traces`:
    # pip install 'prism-serving[traces]'.
    traces: str = ""
    images: ImagesConfig = ImagesConfig()


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
        "search_interval_s": "search_interval",
    },
):
    """The cluster scheduler, which places models on devices."""

    # The interval between plans when nothing changes.
    interval_s: Seconds = Seconds("5s")
    # When memory is short, models that were idle for longer are evicted first (Prism, section 6.2).
    idle_threshold_s: Seconds = Seconds(_POLICY.idle_threshold_s)
    # A model that was idle for less is never evicted.
    min_idle_s: Seconds = Seconds(_POLICY.min_idle_s)
    # A model moves only if KVPR falls by more than this fraction (tau of Algorithm 1).
    migration_threshold: float = _POLICY.migration_threshold
    # A model moves off a device only if the models there other than the busiest one run this many
    # requests at their SLO's pace (token rate x TPOT SLO), and if as many requests wait there or
    # less than a quarter of its memory is free. 0: every move of Algorithm 1 that fits.
    contended_requests: float = _POLICY.contended_requests
    # The time over which token rates are averaged.
    rate_window_s: Seconds = Seconds("60s")
    # The interval after which policies with a placement search, such as muxserve++, search again by
    # the traffic measured so far. null: only at the start, and when models or devices change.
    # seallm adapts it to the errors of its estimates.
    search_interval_s: Seconds | None = Seconds("5m")
    # The handling of running requests when their model moves: "finish" lets them finish (for at
    # most engine.drain_timeout), "move" moves them to the target with their KV. To another machine,
    # KV is sent, or computed again there if that is faster: see nodes[].network_rate.
    migrate_running: str = "finish"

    @property
    def move_running(self) -> bool:
        return self.migrate_running == "move"

    def settings(self) -> Settings:
        """Returns the settings of the policy."""
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

    # "sglang"; "vllm", on host devices; or "fake": predictable answers without a model, for tests.
    adapter: str = "sglang"
    # Adapter -> the Python interpreter of its engines, if they have a separate environment, which
    # must include prism-serving. Relative paths start at this file's folder.
    python: dict[str, str] = {}
    # The most requests that an engine runs at a time.
    max_running: int = 16
    # The memory of an engine with a model in addition to weights and KV. On a GPU: the CUDA
    # context, torch's memory, graphs, workspaces and NCCL. Default: 2GiB on a GPU, 16MiB on a host
    # device.
    static_bytes: Bytes | None = None
    # The memory beyond its leases that an engine may hold on a GPU before it is replaced.
    memory_slack_bytes: Bytes = Bytes("256MiB")
    lora: LoraConfig = LoraConfig()
    # The most prompt tokens that one step computes.
    prefill_chunk_tokens: int = 512
    # The time that an operator's eviction, a move or a shutdown waits for running requests. An
    # eviction by the policy waits for all of them.
    drain_timeout_s: Seconds = Seconds("30s")
    # The time that an engine may load a model, or a model may wait for an engine and for memory,
    # before the activation fails.
    activation_timeout_s: Seconds = Seconds("150s")
    # "per_layer" has the fastest attention. "token_interleaved" has the finest granularity. "auto"
    # chooses the latter if the granularity of the former, times the models that may share the
    # device, exceeds a few percent of its memory. Models with tp are always per layer.
    kv_layout: str = "per_layer"
    # The folder in which the machine keeps weights ready to be copied. Clusters may share it.
    # "auto" is a folder in /dev/shm that is removed with the cluster. "off" disables the store.
    weight_store: str = AUTO_STORE
    # The most bytes in the weight store. Default: 80 % of its file system.
    weight_store_bytes: Bytes | None = None
    # The most bytes per second that an activation copies, over all links together, such as "8GB".
    # It limits the effect on models that decode at the same time. Default: unlimited.
    load_bytes_per_s: Bytes | None = None
    # The GPUs whose links to the host an engine uses to load weights: all of the machine ("node")
    # or only its "own".
    weight_links: str = "node"
    # The memory that a load may take on each other GPU to use its link, while memory there is not
    # short: staging buffers of 32MiB and the engine's CUDA context.
    link_bytes: Bytes = Bytes("512MiB")
    # The smallest load that uses links of other GPUs.
    links_from_bytes: Bytes = Bytes("2GiB")
    # Whether to start NVIDIA's Multi-Process Service, so that engines of a GPU compute at the same
    # time.
    mps: bool = False
    # "lazy" captures graphs of decode steps after a model's first answers, when its engine is idle
    # or has been busy for long. "off" captures none.
    cuda_graphs: str = "lazy"
    # The attention kernels on GPUs, by SGLang's name. Default: SGLang's choice, or "triton" if
    # SGLang's kernels are not installed.
    attention_backend: str | None = None

    def static_on(self, device: str) -> int:
        """Returns the fixed share of an engine with a model on `device`."""
        if self.static_bytes is not None:
            return int(self.static_bytes)
        return _GPU_STATIC_BYTES if is_gpu(device) else _HOST_STATIC_BYTES


class ServeYaml(Strict, frozen=True, kw_only=True):
    """The whole file."""

    # The devices of this machine, at least one unless all models are external. With `nodes`, each
    # node has its own instead.
    devices: list[DeviceYaml] = []
    # At least one model.
    models: list[ModelYaml]
    # The machines, if there are several: see docs/several-machines.md.
    nodes: list[NodeYaml] = []
    # The Ray cluster that starts the machines: HOST:PORT, or "auto" for the one of this machine,
    # which is started if there is none. Without `nodes`, all of Ray's machines with a GPU or a
    # prism_host_device are used, also those that join later. `devices` then describes each GPU as
    # "cuda:*" and each host device as "host:*", and `cluster_key` is generated.
    ray: str | None = None
    # With `nodes`: a file with the key that authenticates the cluster's processes. Only this user
    # may read it. `prism-serve new-cluster-key` makes it. Relative paths start at this file's
    # folder.
    cluster_key: str | None = None
    # The placement and eviction of models: "prism", "static" (fixed shares, no eviction),
    # "serverlessllm", "dedicated", "muxserve++", "muxserve", "seallm", "alpaserve", "qlm",
    # "qlm-first-idle" or "aegaeon"; "prism-fcfs" and "prism-free-memory" are "prism" without its
    # local or its global scheduler. `prism-sim policies` lists all, with their requirements.
    policy: str = "prism"
    # Policy -> its settings, for policies of other packages.
    knobs: dict[str, dict[str, Any]] = {}
    # URL of a Redis-compatible server. On another machine it needs a password or TLS (rediss://).
    # Default: prism-serve starts one. It is required with `nodes`.
    redis: str | None = None
    # A process (frontend, scheduler, agent, bundled Redis, preloaded imports) that does not answer
    # for this long is killed and restarted. At least 15 s.
    hang_timeout: Seconds = _HANG_TIMEOUT
    frontend: FrontendConfig = FrontendConfig()
    access: AccessYaml = AccessYaml()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    journal: JournalYaml = JournalYaml()


# --- resolved -------------------------------------------------------------------------------


class DeviceConfig(msgspec.Struct, frozen=True):
    """One device."""

    name: str
    capacity_bytes: int
    page_bytes: int
    engines: int
    # Capacity in the YAML if it is not a size: "90%", or "free" for the default.
    capacity_text: str = ""
    # Percentage of each engine under MPS. Empty: 100.
    sm_percent: tuple[int, ...] = ()
    # Planned memory of an engine process on a GPU without a model: its CUDA context with its code.
    # The engine measures and leases the real size.
    idle_bytes: int = 0

    @property
    def engines_bytes(self) -> int:
        """Memory of the engine processes without models."""
        return self.engines * self.idle_bytes

    @property
    def models_bytes(self) -> int:
        """Memory that is left for models."""
        return max(0, self.capacity_bytes - self.engines_bytes)

    @property
    def node(self) -> str:
        """Key of devices that a model can be spread over: of one machine, kind and page size."""
        return f"{self.name.partition(':')[0]} {self.page_bytes} {node_of(self.name)}".rstrip()


class ClusterConfig(Endpoints, frozen=True):
    """The resolved configuration."""

    redis_url: str
    policy: str
    devices: list[DeviceConfig]
    models: list[ModelSpec]
    external: list[ExternalModel] = []
    knobs: dict[str, dict[str, Any]] = {}
    host: str = FrontendConfig().host
    port: int = FrontendConfig().port
    # HOST:PORT or an absolute path. Empty: `port` also serves the pages for operators.
    admin: str = FrontendConfig().admin
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    frontend: FrontendConfig = FrontendConfig()
    journal: JournalConfig = JournalConfig()
    keys: list[ApiKey] = []
    open_to_all: bool = False
    hang_timeout_s: float = float(_HANG_TIMEOUT)
    # Interval of an agent's reports without a change. Not in the YAML: only tests change it.
    report_interval_s: float = 0.5
    # Not in the YAML: see `KVMoves`.
    kv_offer_s: float = 5.0
    kv_fetch_s: float = 2.0
    # Not in the YAML: True if a process listens at `preloaded_path` of each device.
    preloaded: bool = False
    # The user's YAML, and the number of its reloads.
    source: str = ""
    revision: int = 0
    # Models that a reload removed from `models` and that still have requests.
    leaving: list[ModelSpec] = []
    # The part of `keys` that was in the environment of `prism-serve`, which is read once.
    variable_keys: list[ApiKey] = []

    @property
    def names(self) -> list[str]:
        """Names of all models, external ones last."""
        return [m.name for m in self.models] + [m.name for m in self.external]

    def adapter_of(self, model: ModelSpec) -> str:
        """Returns the adapter of a model's engines."""
        return model.adapter or self.engine.adapter

    def adapters_on(self, device: str) -> tuple[str, ...]:
        """Returns the adapters of models that may be on `device`. The cluster's default comes
        first."""
        here = [m for m in self.models if m.pinned_device in (None, device)]
        found = {self.adapter_of(model) for model in here} or {self.engine.adapter}
        return tuple(sorted(found, key=lambda name: (name != self.engine.adapter, name)))

    def preloaded_name(self, device: str, adapter: str) -> str:
        """Returns the name of the process that keeps an adapter's imports ready."""
        suffix = "" if adapter == self.engine.adapter else f"-{adapter}"
        return f"preloaded-{device.replace(':', '')}{suffix}"

    def preloaded_path(self, device: str, adapter: str) -> Path:
        """Returns the socket of that process."""
        return Path(self.run_dir) / self.preloaded_name(device, adapter)

    @property
    def frontends_total(self) -> int:
        """Number of frontend processes of the cluster."""
        return sum(node.frontends for node in self.nodes) or self.frontend.processes

    @property
    def frontends_here(self) -> int:
        """Number of frontend processes on this machine."""
        here = self.here
        return self.frontend.processes if here is None else here.frontends

    def local(self) -> ClusterConfig:
        """Returns the configuration of this machine's engines and segments, with its devices by
        their local names."""
        if not self.node:
            return self
        own = [d for d in self.devices if node_of(d.name) == self.node]
        devices = [msgspec.structs.replace(d, name=local_name(d.name)) for d in own]
        namespace = f"{self.namespace}-{self.node}"
        return msgspec.structs.replace(self, devices=devices, namespace=namespace)

    def device_key(self, index: int) -> str:
        """Returns the YAML key of a device."""
        for number, node in enumerate(self.nodes):
            if index < node.devices:
                return f"nodes[{number}].devices[{index}]"
            index -= node.devices
        return f"devices[{index}]"

    def _index(self, device: str) -> int:
        names = [d.name for d in self.devices if node_of(d.name) == node_of(device)]
        return names.index(device)

    def device(self, name: str) -> DeviceConfig:
        return next(d for d in self.devices if d.name == name)

    def model(self, name: str) -> ModelSpec:
        return next(m for m in self.models if m.name == name)
