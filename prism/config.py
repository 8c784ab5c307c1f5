"""The user's YAML and the resolved configuration that every process reads.

`prism-serve` parses and checks the YAML once (`load`), builds `ClusterConfig` and writes it as
JSON (mode 0600) into the run directory; child processes read that file with `read_resolved`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prism.messages import ModelSpec

AUTO_STORE = "auto"  # a weight store of the cluster's own, which ends with it


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the YAML's structs: an unknown key is an error that names it."""


class DeviceYaml(Strict, frozen=True):
    """capacity and page take sizes such as "1GiB" or "64KiB". sm_percent: the part of the GPU's SMs
    that each engine may use, one number for each; default: all of them for all (engine.mps)."""

    name: str
    capacity: str
    page: str = "2MiB"
    engines: int = 2
    sm_percent: list[int] | None = None


class SloYaml(Strict, frozen=True):
    """Times such as "500ms" or "2s"."""

    ttft: str = "2s"
    tpot: str = "200ms"


class ModelYaml(Strict, frozen=True):
    """static_share: this model's fraction of its device's KV memory under the static policy.
    tp: over how many devices it is spread (tensor parallel); the scheduler chooses which."""

    name: str
    path: str
    slo: SloYaml = SloYaml()
    context_length: int | None = None
    dtype: str = "auto"
    never_evict: bool = False
    device: str | None = None
    static_share: float | None = None
    tp: int = 1


class FrontendYaml(Strict, frozen=True):
    """max_open_requests: beyond it new requests get 429. progress_timeout: a request that sees
    no token for this long ends with an error. refused_timeout: one whose model has had no place for
    this long ends with 503 and the scheduler's reason."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_open_requests: int = 4096
    progress_timeout: str = "10m"
    refused_timeout: str = "60s"


MIGRATE_RUNNING = ("finish", "move")


class SchedulerYaml(Strict, frozen=True):
    """idle_threshold: Prism §6.2 evicts models idle longer than this when memory is short.
    min_idle: a model idle for less is not evicted even for a request that nothing else can serve.
    migration_threshold: tau of Algorithm 1, relative gain in KVPR that justifies a move.
    contended_requests: no model leaves a device for balance whose models, but for the busiest, run
    fewer requests than this at a time at their SLO's pace (token rate x TPOT SLO), nor where fewer
    wait while a quarter of the memory is free. 0: every move of Algorithm 1 that has room.
    migrate_running: what becomes of requests that run when their model moves: "finish" where they
    are (at most engine.drain_timeout), or "move" to the target with their KV."""

    interval: str = "5s"
    idle_threshold: str = "45s"
    min_idle: str = "1s"
    migration_threshold: float = 0.2
    contended_requests: float = 4.0
    rate_window: str = "60s"
    migrate_running: str = "finish"


class EngineYaml(Strict, frozen=True):
    """adapter: "sglang" or "fake" (no model, for faults and speed).
    static: the synthetic non-elastic share that each active engine is charged on a host device.
    kv_layout: "per_layer" (the fastest attention), "token_interleaved" (memory grows in the finest
    steps), or "auto" (the finer one for a model whose growth per layer, times the models that may
    share its device, exceeds a few percent of it). Models with tp stay per layer.
    weight_store: where the machine keeps weights ready to be copied: "auto" (a folder in /dev/shm
    that ends with the cluster), "off", or a folder, which clusters may share. weight_store_max: its
    size; default 80 % of its file system. load_rate: most bytes per second that an activation
    copies, for the sake of models that decode beside it, over all links together; default: no
    bound. weight_links: over whose links to the host an engine on a GPU loads weights: those of all
    GPUs here ("node") or its "own" alone. link_memory: what that may take on each other GPU while
    nobody there is short of it: staging of 32MiB, and the engine's CUDA context. links_from: loads
    smaller than this open no other GPU's link. mps: start NVIDIA's Multi-Process Service, so that
    the engines of a GPU compute at the same time.
    """

    adapter: str = "sglang"
    max_running: int = 16
    static: str = "16MiB"
    prefill_chunk_tokens: int = 512
    drain_timeout: str = "30s"
    kv_layout: str = "per_layer"
    weight_store: str = AUTO_STORE
    weight_store_max: str | None = None
    load_rate: str | None = None
    weight_links: str = "node"
    link_memory: str = "512MiB"
    links_from: str = "2GiB"
    mps: bool = False


class JournalYaml(Strict, frozen=True):
    """What schedulers write down beside their logs: keep "off", "decisions" (actions, queues,
    dispatches), or "inputs" (also all that each decision was made on). max: size of a file."""

    keep: str = "off"
    max: str = "256MiB"


class ServeYaml(Strict, frozen=True):
    """The whole file."""

    devices: list[DeviceYaml]
    models: list[ModelYaml]
    policy: str = "prism"
    redis: str | None = None
    frontend: FrontendYaml = FrontendYaml()
    scheduler: SchedulerYaml = SchedulerYaml()
    engine: EngineYaml = EngineYaml()
    journal: JournalYaml = JournalYaml()


# --- resolved -------------------------------------------------------------------------------


class DeviceConfig(msgspec.Struct, frozen=True):
    """`sm_percent`: of each engine under MPS; empty: 100."""

    name: str
    capacity_bytes: int
    page_bytes: int
    engines: int
    sm_percent: tuple[int, ...] = ()

    @property
    def node(self) -> str:
        """Ranks of a model go to devices of one: of one kind, with pages of one size."""
        return f"{self.name.partition(':')[0]} {self.page_bytes}"


class SchedulerConfig(msgspec.Struct, frozen=True):
    interval_s: float = 5.0
    idle_threshold_s: float = 45.0
    min_idle_s: float = 1.0
    migration_threshold: float = 0.2
    contended_requests: float = 4.0
    rate_window_s: float = 60.0
    report_interval_s: float = 0.5
    move_running: bool = False


class EngineConfig(msgspec.Struct, frozen=True):
    adapter: str = "sglang"
    max_running: int = 16
    static_bytes: int = 16 << 20
    prefill_chunk_tokens: int = 512
    drain_timeout_s: float = 30.0
    weight_store: str = ""
    weight_store_bytes: int | None = None
    load_bytes_per_s: int | None = None
    weight_links: str = "node"
    link_bytes: int = 512 << 20
    links_from_bytes: int = 2 << 30
    mps: bool = False
    # Not in the YAML: only tests need others, see DirectMoves.
    kv_offer_s: float = 5.0
    kv_fetch_s: float = 2.0


class FrontendConfig(msgspec.Struct, frozen=True):
    max_open_requests: int = 4096
    progress_timeout_s: float = 600.0
    refused_timeout_s: float = 60.0


class JournalConfig(msgspec.Struct, frozen=True):
    keep: str = "off"
    max_bytes: int = 256 << 20


class ClusterConfig(msgspec.Struct, frozen=True):
    """namespace separates the shared-memory segments and Redis keys of two clusters on one
    machine; run_dir (mode 0700) holds sockets, logs and this file."""

    namespace: str
    run_dir: str
    redis_url: str
    policy: str
    devices: list[DeviceConfig]
    models: list[ModelSpec]
    host: str = "127.0.0.1"
    port: int = 8000
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    frontend: FrontendConfig = FrontendConfig()
    journal: JournalConfig = JournalConfig()

    @property
    def scheduler_endpoint(self) -> str:
        return f"ipc://{self.run_dir}/scheduler"

    def agent_engines_endpoint(self, device: str) -> str:
        return f"ipc://{self.run_dir}/engines-{device.replace(':', '')}"

    def agent_cancel_endpoint(self, device: str) -> str:
        return f"ipc://{self.run_dir}/cancel-{device.replace(':', '')}"

    @property
    def moves_dir(self) -> str:
        """Where KV of requests waits for its next engine: in shared memory."""
        return f"/dev/shm/{self.namespace}-moves"

    def frontend_endpoint(self, frontend_id: str) -> str:
        return f"ipc://{self.run_dir}/frontend-{frontend_id}"

    def device(self, name: str) -> DeviceConfig:
        return next(d for d in self.devices if d.name == name)

    def model(self, name: str) -> ModelSpec:
        return next(m for m in self.models if m.name == name)


def write_resolved(config: ClusterConfig, path: Path) -> None:
    """Write `config` as JSON, readable by this user only (it may hold the Redis password)."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(config))


def read_resolved(path: Path) -> ClusterConfig:
    """REQUIRES: `path` was written by `write_resolved` of the same version."""
    return msgspec.json.decode(path.read_bytes(), type=ClusterConfig)
