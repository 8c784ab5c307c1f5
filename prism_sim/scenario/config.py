"""Schema of the `prism-sim` YAML; `scenario.py` resolves it."""

from __future__ import annotations

import math
from typing import Any, Literal

from prism.config.schema.cluster_config import SchedulerConfig
from prism.config.schema.machines import Strict
from prism.config.schema.replicas import ReplicasYaml
from prism.config.schema.slo import SloYaml
from prism.config.schema.units import Bytes, Seconds


class GpusYaml(Strict, frozen=True):
    """The GPUs."""

    # a100-40, a100-80, h100, h200, l40s, or a type of `gpu_files`.
    type: str = "h100"
    # Number of GPUs.
    count: int = 1
    # Number of machines over which the GPUs are spread evenly.
    nodes: int = 1
    # Memory of each GPU. Default: the type's.
    memory: Bytes | None = None
    # The part of the memory that models may use.
    memory_fraction: float = 0.9
    # The unit in which KV memory is mapped.
    page: Bytes = Bytes("2MiB")
    # Maximum number of models on a GPU at a time.
    engines: int = 16
    # Bytes per second between nodes.
    network_rate: Bytes = Bytes("12.5GB")


class SimSloYaml(SloYaml, frozen=True):
    """Latency targets of a request."""

    # From arrival to the last token. Default: TTFT + TPOT x (output tokens - 1) of each request.
    e2e: Seconds | None = None


class SimModelYaml(Strict, frozen=True):
    """One model, or `count` identical models."""

    # Name of the model in the trace.
    name: str
    # A public model that `prism_sim.costs` knows; or a Hugging Face config.json under any name that
    # ends in .json, or a folder with one, relative to this file. Default: the name.
    shape: str | None = None
    # Tensor-parallel degree: number of GPUs of one copy. auto: the least one at which it fits; the
    # policy "prism" raises and lowers it by the model's traffic and SLOs.
    tp: int | Literal["auto"] = "auto"
    # Type of the KV cache: auto (the model's own), bf16, fp8_e4m3 or fp8_e5m2.
    kv_cache_dtype: str = "auto"
    # The most tokens of a prompt and its output; a longer request fails with
    # `context_length_exceeded`. Default: the shape's.
    context_length: int | None = None
    # Number of identical models. If above 1, they are named NAME-0, NAME-1, ...
    count: int = 1
    # Default: the SLO of the whole file.
    slo: SimSloYaml | None = None
    # Size of the weights. Default: from the shape.
    weights: Bytes | None = None
    # KV reserved for the model. Default, and with 0: KV of its longest request that
    # the context and the memory of its GPUs allow.
    kv_reserve_tokens: int | None = None
    # True: the model is not evicted while it is idle.
    never_evict: bool = False
    # The only GPU that may serve the model, such as gpu:0. Cannot be combined with policies that
    # search a placement or let models take turns. Default: the scheduler chooses.
    device: str | None = None
    # This model's fraction of its GPU's KV memory under the static policy, above 0 and at most 1.
    static_share: float | None = None
    replicas: ReplicasYaml = ReplicasYaml()
    # The model's part of the requests of a generated trace. Default: by the trace's kind.
    share: float | None = None


class GenerateYaml(Strict, frozen=True):
    """A generated trace. The order of the models is their popularity, highest first."""

    # "production": sessions with the statistics of Prism §3.1. "bursty": groups of models with
    # changing load. "steady": MuxServe's power law.
    kind: str = "production"
    # For bursty: a preset of `prism-sim trace generate`, for as many models as the file has.
    preset: str | None = None
    # Length of the trace.
    seconds: float = 600.0
    # Requests per second of all models. Default: 4, or the preset's.
    rate: float | None = None
    # For production: the part of the models that is active at a time. Default: 0.5.
    active_fraction: float | None = None
    # Coefficient of variation of the gaps between requests. Default: 2.5 for production, 1 for
    # steady.
    gap_cv: float | None = None
    # For steady: the exponent of the power law. Default: 0.9.
    alpha: float | None = None
    # Median length of prompts. Default of this and the next three: as in the Chatbot Arena sample,
    # or in ShareGPT for steady.
    input_median: float | None = None
    # Maximum length of prompts.
    input_max: int | None = None
    # Median length of outputs.
    output_median: float | None = None
    # Maximum length of outputs.
    output_max: int | None = None


class SourceYaml(Strict, frozen=True):
    """Format of the file in `trace`. Cannot be combined with `generate`."""

    # prism, arena, azure, burstgpt, csv (a folder has a file per model), maf, mooncake, servegen,
    # sharegpt or vidur.
    format: str = "prism"
    # Mapping of the file's models onto `models`, most popular first: "popularity" or "round-robin".
    # Default: names must agree.
    map: str | None = None
    # Start of the part to use.
    start: str = "0s"
    # Length of the part to use. Default: to the end.
    window: Seconds | None = None
    # Maximum number of requests to use.
    limit: int | None = None
    # Requests per second, for sources without times.
    rate: float = 1.0
    # Part of the requests to keep, for sources of rates.
    thin: float = 1.0
    # FORMAT=FILE, relative to this file: source of lengths, for sources without lengths.
    lengths: str | None = None


class SimEngineYaml(Strict, frozen=True):
    """The engines."""

    # Maximum number of running requests of an engine.
    max_running: int = 256
    # Memory of an active engine on each of its GPUs, in addition to weights and KV.
    static: Bytes = Bytes("1GiB")
    # Maximum number of prompt tokens in one step.
    prefill_chunk_tokens: int = 8192
    # True: a step may combine prompts and decodes.
    mixed_chunk: bool = False
    # Tokens of a KV block.
    block_tokens: int = 16
    # Layout of KV memory, as in prism-serve: "per_layer", "token_interleaved" or "auto".
    kv_layout: str = "per_layer"
    # Host time per step that does not overlap with the GPU. Default: the cost table's.
    host: Seconds | None = None
    # Time from a request's arrival to its device's queue (HTTP, tokenizer, queues). Default: none.
    request: Seconds | None = None
    # True: an engine needs reserved KV to start.
    memory_reserve: bool = True
    # Output tokens for which admission requires free memory.
    headroom_tokens: int = 64
    # True: engines cache prompt prefixes, which the trace identifies by hash_ids.
    prefix_reuse: bool = False


class ActivationYaml(Strict, frozen=True):
    """Times and rates of model activation. Rates are bytes per second."""

    # Time to lay out the virtual space in a running engine.
    layout: Seconds = Seconds("30ms")
    # Start of a new engine process, for policies that restart engines.
    restart: Seconds = Seconds("15s")
    # Rate of one GPU in a parallel load from host memory.
    load_rate: Bytes = Bytes("23GB")
    # Rate of all GPUs of a node together.
    node_load_rate: Bytes = Bytes("95GB")
    # Load rate of a restarted engine.
    plain_load_rate: Bytes = Bytes("4GB")
    # Rate between two GPUs of a node.
    peer_rate: Bytes = Bytes("400GB")
    # Host memory of each node for the most recently used weights. Other weights come from the
    # node's disk, or from another node's host memory if `gpus.network_rate` is above `disk_rate`.
    # Default: host memory has all weights, subject to `weights_everywhere`.
    host_store: Bytes | None = None
    # Rate from a node's disk into its host memory.
    disk_rate: Bytes = Bytes("2GB")
    # True: every node has all weights in host memory. False: each model is stored on one node.
    weights_everywhere: bool = True
    # True: activations of the first plan take no time.
    warm_start: bool = True


class BaselinesYaml(Strict, frozen=True):
    """Parameters of single policies that their papers do not specify."""

    # Rates for placement searches and static: each model's "mean" over the trace, its "peak" in the
    # busiest tenth, or "equal" rates.
    search_rates: str = "mean"
    # static: division of a device's KV memory among models without a static_share, in "equal"
    # parts, for an equal number of "tokens", or in proportion to the "rates".
    static_kv: str = "equal"
    # qlm: maximum number of requests in a group.
    qlm_group: int = 64
    # muxserve: the part of a GPU's compute that must be free for a prefill to start.
    muxserve_prefill: float = 0.5
    # muxserve: interval at which quotas of token blocks are adapted.
    muxserve_adapt: Seconds = Seconds("5s")
    # seallm: maximum number of services in a sharing group.
    seallm_services: int = 2
    # seallm: a request that has waited for this many budgets has priority.
    seallm_starvation: float = 5.0
    # aegaeon: the part of the GPUs that prefill. At least one GPU prefills, and one decodes.
    aegaeon_prefill: float = 0.375


class SimYaml(Strict, frozen=True):
    """The whole file."""

    # At least one model.
    models: list[SimModelYaml]
    gpus: GpusYaml = GpusYaml()
    # File of requests, relative to this file. Set either this or `generate`.
    trace: str | None = None
    source: SourceYaml = SourceYaml()
    generate: GenerateYaml | None = None
    # Policy; `prism-sim policies` lists all.
    policy: str = "prism"
    # Policy -> its parameters, for policies of other packages.
    knobs: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (msgspec copies it)
    slo: SimSloYaml = SimSloYaml()
    # Factor on the number of requests.
    rate_scale: float = 1.0
    # Factor on every SLO.
    slo_scale: float = 1.0
    # True: SLOs are the P95 TTFT, TPOT and end-to-end latency of each model on dedicated GPUs at
    # rate scale 1 (Prism §7.2), times slo_scale. They replace those of `slo` and of the trace.
    base_slos: bool = False
    # Seed of all random numbers.
    seed: int = 0
    # Files of step costs from `prism-sim calibrate engine`, relative to this file. Each applies to
    # the GPU, model and TP that it names.
    cost_files: tuple[str, ...] = ()
    # Files of additional GPU types, relative to this file. See [`types[]`](#types).
    gpu_files: tuple[str, ...] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: SimEngineYaml = SimEngineYaml()
    activation: ActivationYaml = ActivationYaml()
    baselines: BaselinesYaml = BaselinesYaml()
    # Number of requests on which placement searches simulate a placement.
    search_requests: int = 600
    # Time after the last arrival at which open requests fail with `unserved`.
    patience: Seconds = Seconds("10m")
    # "runs": a run of decode steps is one event. "single": each step is an event; the results are
    # the same, slower.
    steps: str = "runs"


class GpuTypeYaml(Strict, frozen=True):
    """A GPU type, in the list `types` of a file of `gpu_files`. Rates are per second."""

    # Name in `gpus.type` and in cost tables. Must differ from the names that Prism knows.
    name: str
    # Memory of one GPU.
    memory: Bytes
    # Peak memory bandwidth.
    bandwidth: Bytes
    # Dense 16-bit peak, in 10^12 operations.
    tflops: float
    # PCIe bandwidth per GPU, in one direction.
    pcie: Bytes = Bytes("32GB")
    # NVLink bandwidth per GPU, in one direction. Default: GPUs communicate over PCIe.
    nvlink: Bytes | None = None
    # The part of the compute peak that large kernels reach.
    compute_efficiency: float = 0.65
    # The part of the memory bandwidth that large kernels reach.
    bandwidth_efficiency: float = 0.8
    # Latency of one small all-reduce.
    allreduce: Seconds = Seconds("12us")

    def __post_init__(self) -> None:
        if not 0 < self.tflops < math.inf:
            raise ValueError("tflops must be > 0 and finite")
        if not (0 < self.compute_efficiency <= 1 and 0 < self.bandwidth_efficiency <= 1):
            raise ValueError("compute_efficiency and bandwidth_efficiency must be in (0, 1]")


class GpuFileYaml(Strict, frozen=True):
    """A file of `gpu_files`."""

    types: list[GpuTypeYaml]
