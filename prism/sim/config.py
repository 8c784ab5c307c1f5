"""The YAML of `prism-sim`, as it is written. `scenario.py` resolves it."""

from __future__ import annotations

from prism.config import SchedulerYaml, SloYaml, Strict


class GpusYaml(Strict, frozen=True):
    """type: a GPU that `prism.costs` knows. memory: default the type's; memory_fraction: the part
    of it that models may use. engines: models per GPU at most. network_rate: bytes per second
    between nodes."""

    type: str = "h100"
    count: int = 1
    nodes: int = 1
    memory: str | None = None
    memory_fraction: float = 0.9
    page: str = "2MiB"
    engines: int = 16
    network_rate: str = "12.5GB"


class SimSloYaml(SloYaml, frozen=True):
    """e2e: from arrival to the last token; default TTFT + TPOT x (output tokens - 1) of each
    request."""

    e2e: str | None = None


class SimModelYaml(Strict, frozen=True):
    """shape: a public model whose shape `prism.costs` knows; default the name. weights: size,
    default from the shape. count: so many models of this kind, named NAME-0, NAME-1, ... .
    kv_reserve_tokens: KV that is always the model's own; default its longest request.
    share: its part of the requests of a generated trace."""

    name: str
    shape: str | None = None
    tp: int = 1
    count: int = 1
    slo: SimSloYaml | None = None
    weights: str | None = None
    kv_reserve_tokens: int | None = None
    never_evict: bool = False
    device: str | None = None
    static_share: float | None = None
    share: float | None = None


class GenerateYaml(Strict, frozen=True):
    """kind: production, calm sessions with the statistics of Prism §3.1; bursty, groups that come
    and go, perhaps by a preset of `prism-sim trace generate`, which has as many models as the file;
    steady, MuxServe's power law. Models are most popular first. rate: requests per second of all
    models, 4 unless a preset's. active_fraction: production, 0.5. gap_cv: production, 2.5, and
    steady, 1. alpha: steady, 0.9. Lengths: default those of the Chatbot Arena sample, of ShareGPT
    for steady."""

    kind: str = "production"
    preset: str | None = None
    seconds: float = 600.0
    rate: float | None = None
    active_fraction: float | None = None
    gap_cv: float | None = None
    alpha: float | None = None
    input_median: float | None = None
    input_max: int | None = None
    output_median: float | None = None
    output_max: int | None = None


class SourceYaml(Strict, frozen=True):
    """How the file of `trace` is read. format: prism, arena, azure, burstgpt, csv (a folder has a
    file per model), maf, mooncake, servegen, sharegpt, vidur. map: its models onto those of
    `models`, most popular first, by "popularity" or "round-robin"; without it names must agree.
    start, window:
    the part to take. limit: of requests. rate: requests per second of sources without times; thin:
    the part to keep of sources of rates; lengths: FORMAT=FILE that lengths are drawn from, for
    sources without any."""

    format: str = "prism"
    map: str | None = None
    start: str = "0s"
    window: str | None = None
    limit: int | None = None
    rate: float = 1.0
    thin: float = 1.0
    lengths: str | None = None


class SimEngineYaml(Strict, frozen=True):
    """static: non-elastic memory of an active engine on each of its GPUs. host: time per step not
    hidden behind the GPU, default that of the cost table. request: from a request's arrival to its
    device's queue (HTTP, tokenizer, queues). kv_layout: as in prism-serve.
    memory_reserve: false lets an engine start without KV of its own. prefix_reuse: prompts whose
    beginning (by the trace's hash_ids) an engine still has are computed from there on."""

    max_running: int = 256
    static: str = "1GiB"
    prefill_chunk_tokens: int = 8192
    mixed_chunk: bool = False
    block_tokens: int = 16
    kv_layout: str = "per_layer"
    host: str | None = None
    request: str | None = None
    memory_reserve: bool = True
    headroom_tokens: int = 64
    prefix_reuse: bool = False


class ActivationYaml(Strict, frozen=True):
    """See `setup.ActivationSettings`; rates are bytes per second."""

    layout: str = "30ms"
    restart: str = "15s"
    load_rate: str = "23GB"
    node_load_rate: str = "95GB"
    plain_load_rate: str = "4GB"
    peer_rate: str = "400GB"
    weights_everywhere: bool = True
    warm_start: bool = True


class BaselinesYaml(Strict, frozen=True):
    """What single policies can be tuned with; their papers leave it open. search_rates: the rates
    that placement searches are given, each model's "mean" over the trace, its "peak" in the busiest
    tenth, or "equal" ones. static_kv: how static divides a device's KV memory among models without
    a static_share, into "equal" parts or with room for as many "tokens" each. qlm_group: requests
    of a group at most. muxserve_prefill: the part of a GPU's compute that a prefill waits for;
    muxserve_adapt: how often token-block quotas move. seallm_services: in a sharing group at most;
    seallm_starvation: a request that has waited for so many budgets goes first."""

    search_rates: str = "mean"
    static_kv: str = "equal"
    qlm_group: int = 64
    muxserve_prefill: float = 0.5
    muxserve_adapt: str = "5s"
    seallm_services: int = 2
    seallm_starvation: float = 5.0


class SimYaml(Strict, frozen=True):
    """The whole file. trace: a file, relative to this one, read as `source` says; or generate: one.
    rate_scale multiplies the requests, slo_scale every SLO. base_slos: SLOs are P95 latencies of
    each model on GPUs of its own at rate scale 1 (Prism §7.2), times slo_scale, whatever `slo` and
    the trace say. cost_files: step costs that
    `prism-sim calibrate engine` measured, relative to the file, for the (GPU, model, TP) in them.
    search_requests: of the trace, on which placement searches with a simulator try placements.
    replacement_interval: the first one of seallm, whose placement is searched anew.
    """

    models: list[SimModelYaml]
    gpus: GpusYaml = GpusYaml()
    trace: str | None = None
    source: SourceYaml = SourceYaml()
    generate: GenerateYaml | None = None
    policy: str = "prism"
    slo: SimSloYaml = SimSloYaml()
    rate_scale: float = 1.0
    slo_scale: float = 1.0
    base_slos: bool = False
    seed: int = 0
    cost_files: tuple[str, ...] = ()
    scheduler: SchedulerYaml = SchedulerYaml()
    engine: SimEngineYaml = SimEngineYaml()
    activation: ActivationYaml = ActivationYaml()
    baselines: BaselinesYaml = BaselinesYaml()
    search_requests: int = 600
    patience: str = "10m"
    replacement_interval: str = "5m"
    steps: str = "runs"
