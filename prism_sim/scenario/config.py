"""The YAML of `prism-sim`, as it is written. `scenario.py` resolves it."""

from __future__ import annotations

import math
from typing import Any

from prism.config.machines import Strict
from prism.config.replicas import ReplicasYaml
from prism.config.schema import SchedulerConfig
from prism.config.slo import SloYaml
from prism.config.units import Bytes, Seconds


class GpusYaml(Strict, frozen=True):
    """The GPUs."""

    # a100-40, a100-80, h100, h200, l40s, or a type of `gpu_files`.
    type: str = "h100"
    # How many in all.
    count: int = 1
    # Over how many machines they are spread evenly.
    nodes: int = 1
    # Of each GPU. Default: the type's.
    memory: Bytes | None = None
    # The part of the memory that models may use.
    memory_fraction: float = 0.9
    # The unit in which KV memory is mapped.
    page: Bytes = Bytes("2MiB")
    # The most models on a GPU at a time.
    engines: int = 16
    # Bytes per second between nodes.
    network_rate: Bytes = Bytes("12.5GB")


class SimSloYaml(SloYaml, frozen=True):
    """The latencies that a request should keep to."""

    # From arrival to the last token. Default: TTFT + TPOT x (output tokens - 1) of each request.
    e2e: Seconds | None = None


class SimModelYaml(Strict, frozen=True):
    """One model, or `count` equal ones."""

    # What the trace calls the model.
    name: str
    # A public model whose shape `prism_sim.costs` knows; or Hugging Face's config.json under any
    # name that ends in .json, or a folder with one, relative to this file. Default: the name.
    shape: str | None = None
    # Over how many GPUs it is spread (tensor parallel).
    tp: int = 1
    # With more than 1: so many models of this kind, called NAME-0, NAME-1, ...
    count: int = 1
    # Default: the SLO of the whole file.
    slo: SimSloYaml | None = None
    # Size of the weights. Default: from the shape.
    weights: Bytes | None = None
    # KV that is always the model's own. Default, and with 0: its longest request.
    kv_reserve_tokens: int | None = None
    # Whether the model keeps its place while it is idle.
    never_evict: bool = False
    # The only GPU that may serve the model, gpu:0 or a later one. Policies that search for a
    # placement or take turns are refused with it. Default: the scheduler chooses.
    device: str | None = None
    # This model's fraction of its GPU's KV memory under the static policy, above 0 and at most 1.
    static_share: float | None = None
    replicas: ReplicasYaml = ReplicasYaml()
    # Its part of the requests of a generated trace. Default: by the trace's kind.
    share: float | None = None


class GenerateYaml(Strict, frozen=True):
    """A trace that is generated. Models are most popular first."""

    # "production": calm sessions with the statistics of Prism §3.1. "bursty": groups of models that
    # come and go. "steady": MuxServe's power law.
    kind: str = "production"
    # Of bursty: a preset of `prism-sim trace generate`. It needs as many models as the file has.
    preset: str | None = None
    # How long the trace is.
    seconds: float = 600.0
    # Requests per second of all models. Default: 4, or the preset's.
    rate: float | None = None
    # Of production: the part of the models that is active at a time. Default: 0.5.
    active_fraction: float | None = None
    # The coefficient of variation of gaps. Default: 2.5 for production, 1 for steady.
    gap_cv: float | None = None
    # Of steady: the exponent of the power law. Default: 0.9.
    alpha: float | None = None
    # Default of these four: the lengths of the Chatbot Arena sample, of ShareGPT for steady.
    input_median: float | None = None
    # The longest prompt.
    input_max: int | None = None
    # The median answer.
    output_median: float | None = None
    # The longest answer.
    output_max: int | None = None


class SourceYaml(Strict, frozen=True):
    """How the file of `trace` is read; not beside `generate`."""

    # prism, arena, azure, burstgpt, csv (a folder has a file per model), maf, mooncake, servegen,
    # sharegpt or vidur.
    format: str = "prism"
    # Puts its models onto those of `models`, most popular first: "popularity" or "round-robin".
    # Default: names must agree.
    map: str | None = None
    # Where the part to take begins.
    start: str = "0s"
    # How long the part to take is. Default: to the end.
    window: Seconds | None = None
    # The most requests to take.
    limit: int | None = None
    # Requests per second of sources without times.
    rate: float = 1.0
    # The part to keep of sources of rates.
    thin: float = 1.0
    # FORMAT=FILE, relative to this file, that lengths are drawn from, for sources without any.
    lengths: str | None = None


class SimEngineYaml(Strict, frozen=True):
    """The engines."""

    # The most requests that an engine runs at a time.
    max_running: int = 256
    # Memory of an active engine beside weights and KV, on each of its GPUs.
    static: Bytes = Bytes("1GiB")
    # The most prompt tokens that one step computes.
    prefill_chunk_tokens: int = 8192
    # Whether a step computes prompts and decodes together.
    mixed_chunk: bool = False
    # Tokens of a KV block.
    block_tokens: int = 16
    # As in prism-serve.
    kv_layout: str = "per_layer"
    # Time per step that the GPU does not hide. Default: the cost table's.
    host: Seconds | None = None
    # From a request's arrival to its device's queue (HTTP, tokenizer, queues). Default: none.
    request: Seconds | None = None
    # Whether an engine needs KV of its own to start.
    memory_reserve: bool = True
    # Room for output tokens that admission asks for.
    headroom_tokens: int = 64
    # Whether engines keep the beginnings of prompts that the trace names by hash_ids.
    prefix_reuse: bool = False


class ActivationYaml(Strict, frozen=True):
    """How long a model takes to come up. Rates are bytes per second."""

    # Laying out the virtual space in a running engine.
    layout: Seconds = Seconds("30ms")
    # A new engine process, for policies that restart engines.
    restart: Seconds = Seconds("15s")
    # One GPU's share of a parallel load from host memory.
    load_rate: Bytes = Bytes("23GB")
    # All GPUs of a node together.
    node_load_rate: Bytes = Bytes("95GB")
    # The load of a restarted engine.
    plain_load_rate: Bytes = Bytes("4GB")
    # From another GPU of the node.
    peer_rate: Bytes = Bytes("400GB")
    # How much of the models each node keeps in host memory, most recently used. All are on its disk
    # as well, and come from there, or from another node's host memory if `gpus.network_rate` is
    # above `disk_rate`. Default: host memory holds all, as `weights_everywhere` says.
    host_store: Bytes | None = None
    # From a node's disk into its host memory.
    disk_rate: Bytes = Bytes("2GB")
    # Whether every node holds all weights in host memory. If not, each model's lie on one node.
    weights_everywhere: bool = True
    # Whether the first plan's activations take no time.
    warm_start: bool = True


class BaselinesYaml(Strict, frozen=True):
    """What single policies can be tuned with; their papers leave it open."""

    # The rates that placement searches are given: each model's "mean" over the trace, its "peak" in
    # the busiest tenth, or "equal" ones.
    search_rates: str = "mean"
    # How static divides a device's KV memory among models without a static_share: "equal" parts, or
    # room for as many "tokens" each.
    static_kv: str = "equal"
    # The most requests of a group of qlm.
    qlm_group: int = 64
    # Of muxserve: the part of a GPU's compute that a prefill waits for.
    muxserve_prefill: float = 0.5
    # Of muxserve: how often quotas of token blocks move.
    muxserve_adapt: Seconds = Seconds("5s")
    # The most services in a sharing group of seallm.
    seallm_services: int = 2
    # Of seallm: a request that has waited for so many budgets goes first.
    seallm_starvation: float = 5.0
    # Of aegaeon: the part of the GPUs that prefill. At least one does, and one decodes.
    aegaeon_prefill: float = 0.375


class SimYaml(Strict, frozen=True):
    """The whole file."""

    # At least one model.
    models: list[SimModelYaml]
    gpus: GpusYaml = GpusYaml()
    # A file with requests, relative to this one. Give this or `generate`.
    trace: str | None = None
    source: SourceYaml = SourceYaml()
    generate: GenerateYaml | None = None
    # `prism-sim policies` lists all.
    policy: str = "prism"
    # Policy -> what it is tuned with, for policies that other packages add.
    knobs: dict[str, dict[str, Any]] = {}  # noqa: RUF012 (msgspec copies it)
    slo: SimSloYaml = SimSloYaml()
    # Multiplies the requests.
    rate_scale: float = 1.0
    # Multiplies every SLO.
    slo_scale: float = 1.0
    # SLOs are P95 latencies of each model on GPUs of its own at rate scale 1 (Prism §7.2), times
    # slo_scale, whatever `slo` and the trace say.
    base_slos: bool = False
    # Of all that is drawn by chance.
    seed: int = 0
    # Step costs that `prism-sim calibrate engine` measured, relative to this file, for the GPU,
    # model and TP in them.
    cost_files: tuple[str, ...] = ()
    # Types of GPUs of your own, relative to this file. See [`types[]`](#types).
    gpu_files: tuple[str, ...] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: SimEngineYaml = SimEngineYaml()
    activation: ActivationYaml = ActivationYaml()
    baselines: BaselinesYaml = BaselinesYaml()
    # Requests of the trace on which searches with a simulator inside try placements.
    search_requests: int = 600
    # After the last arrival, requests that still wait are given up after this time.
    patience: Seconds = Seconds("10m")
    # The time to seallm's first new placement.
    replacement_interval: Seconds = Seconds("5m")
    # "runs" takes runs of decode steps as one event. "single" takes one step per event: the same
    # results, slower.
    steps: str = "runs"


class GpuTypeYaml(Strict, frozen=True):
    """A type of GPUs, in the list `types` of a file of `gpu_files`. Rates are per second."""

    # What `gpus.type` and cost tables call it. No name that Prism knows.
    name: str
    # Of one GPU.
    memory: Bytes
    # Peak rate of its memory.
    bandwidth: Bytes
    # Dense 16-bit peak, in 10^12 operations.
    tflops: float
    # One direction, per GPU.
    pcie: Bytes = Bytes("32GB")
    # Likewise. Default: peers talk over PCIe.
    nvlink: Bytes | None = None
    # The part of the peak that large kernels reach.
    compute_efficiency: float = 0.65
    # The part of the memory's peak rate that they reach.
    bandwidth_efficiency: float = 0.8
    # Latency of one small all-reduce.
    allreduce: Seconds = Seconds("12us")

    def __post_init__(self) -> None:
        if not 0 < self.tflops < math.inf:
            raise ValueError("tflops must be above 0 and finite")
        if not (0 < self.compute_efficiency <= 1 and 0 < self.bandwidth_efficiency <= 1):
            raise ValueError("compute_efficiency and bandwidth_efficiency must be in (0, 1]")


class GpuFileYaml(Strict, frozen=True):
    """A file of `gpu_files`."""

    types: list[GpuTypeYaml]
