"""Every message that crosses a socket or is stored in Redis, as msgspec tagged structs.

Encoding is MessagePack. New fields get defaults, so that processes of neighbouring versions can
talk. Times named `*_unix_s` are wall-clock seconds since the epoch (they cross processes);
monotonic times never leave a process. Token ids are the model's own vocabulary ids.

Topology (all sockets are ZeroMQ; `ipc://` below the run directory, or loopback TCP):
  frontend  binds PULL    <- agents PUSH `ToFrontend`
  agent     binds ROUTER  <- its engines DEALER (identity = engine id): `ToEngine` / `FromEngine`
  agent     binds PULL    <- frontends PUSH `ToAgent` (cancellations)
  scheduler binds ROUTER  <- agents DEALER (identity = device): `ToScheduler`, `FromScheduler`
                          <- operators DEALER (any other): `OperatorCommand`, `ActionResult`
"""

from __future__ import annotations

import msgspec

FinishReason = str  # "stop" | "length" | "cancelled"


class Wire(msgspec.Struct, frozen=True, tag=True, array_like=False, omit_defaults=True):
    """Base of all wire messages; the class name is the tag."""


# --- requests ------------------------------------------------------------------------------


class Sampling(Wire, frozen=True):
    """Decoding parameters, in OpenAI's terms. `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class Resume(Wire, frozen=True):
    """Where a request that moved here goes on: its output so far; KV of its first `kv_tokens`
    tokens (prompt, then output), offered at an address for each rank or in a file, or else none."""

    output_ids: list[int]
    kv_path: str = ""
    kv_tokens: int = 0
    kv_offers: tuple[str, ...] = ()


class Request(Wire, frozen=True):
    """A tokenised request as it waits in a queue. The frontend owns its log. `attempt` grows when
    it is sent again after an engine's death. `resume`: it moved in the middle of its output.
    deadline_unix_s = arrival_unix_s + slo_ttft_s (Prism §6.3)."""

    id: str
    model: str
    prompt_ids: list[int]
    sampling: Sampling
    arrival_unix_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    frontend_id: str
    reply_to: str
    attempt: int = 1
    resume: Resume | None = None

    @property
    def known_tokens(self) -> int:
        """Of the prompt, and of the output that it came with."""
        return len(self.prompt_ids) + (len(self.resume.output_ids) if self.resume else 0)

    @property
    def prefill_tokens(self) -> int:
        """Those of them whose KV does not come with it."""
        return self.known_tokens - (self.resume.kv_tokens if self.resume else 0)

    @property
    def deadline_unix_s(self) -> float:
        return self.arrival_unix_s + self.slo_ttft_s


class Chunk(Wire, frozen=True):
    """Tokens of one request from one engine step; `first_index`: the position of the first in its
    output. The chunk with a `finish_reason` is the request's last."""

    request_id: str
    attempt: int
    first_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class Failure(Wire, frozen=True):
    """A request ended without finishing. `retryable`: another engine may serve it again."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool = False


# --- models --------------------------------------------------------------------------------


class ModelSpec(Wire, frozen=True):
    """A model as every process needs to know it; built once from the YAML and the model's files.
    weight_bytes: resident bytes of the weights in `dtype`; token_bytes: KV bytes of one token over
    all layers, K and V, in `kv_dtype`, with the gap that its kv_arrangement (kvcached's) leaves.
    tp: over how many devices it is spread (tensor parallel), `peers` being those of ranks 1
    and up; sizes are those of the whole model."""

    name: str
    path: str
    architecture: str
    dtype: str
    kv_dtype: str
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int
    token_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    never_evict: bool = False
    pinned_device: str | None = None
    static_share: float | None = None
    kv_arrangement: str = "per_layer"
    tp: int = 1


# --- agent -> engine -----------------------------------------------------------------------


class Activate(Wire, frozen=True):
    """Serve this model now. `kv_limit_bytes` caps its elastic memory (None: the device's room).
    `fingerprint`: what the model must answer in its warm-up (empty: nothing is expected)."""

    model: ModelSpec
    kv_limit_bytes: int | None = None
    max_running: int = 32
    fingerprint: tuple[int, ...] = ()


class Deactivate(Wire, frozen=True):
    """Give every page back and wait for the next model. Requests still running are failed."""


class Submit(Wire, frozen=True):
    requests: list[Request]


class Cancel(Wire, frozen=True):
    request_ids: list[str]


class Export(Wire, frozen=True):
    """Stop all requests and hand them back as far as they are, KV offered to ranks on `targets`."""

    targets: tuple[str, ...] = ()


class SetLimit(Wire, frozen=True):
    kv_limit_bytes: int | None


class Shutdown(Wire, frozen=True):
    """Finish nothing, free everything, exit 0."""


ToEngine = Activate | Deactivate | Submit | Cancel | Export | SetLimit | Shutdown

# --- engine -> agent -----------------------------------------------------------------------


class EngineHello(Wire, frozen=True):
    engine_id: str
    pid: int


class Activated(Wire, frozen=True):
    """The model answers. `quantum_bytes`: its smallest growth of KV memory; `floor_bytes`: KV
    that stays resident while it is active (padding block); `reserve_bytes`: guaranteed KV of
    this engine so that one request of full context can always run to its end. `stages_s`: seconds
    of each stage in order, and "total"; `fingerprint`: what it answered in its warm-up;
    `link_bytes`: what came out of the store over each GPU's link to the host ("host": no GPU)."""

    model: str
    quantum_bytes: int
    quantum_tokens: int
    floor_bytes: int
    reserve_bytes: int
    static_bytes: int
    block_tokens: int
    max_running: int
    stages_s: dict[str, float] = {}
    fingerprint: tuple[int, ...] = ()
    link_bytes: dict[str, int] = {}


class ActivationFailed(Wire, frozen=True):
    """missing_bytes: 0 if memory is not the cause. needs_fresh_engine: it failed its self-check."""

    model: str
    message: str
    missing_bytes: int = 0
    needs_fresh_engine: bool = False


class Deactivated(Wire, frozen=True):
    model: str
    seconds: float


class Exported(Wire, frozen=True):
    """Requests that were stopped, each with its `resume`; none of them is on the engine now."""

    requests: list[Request]


class EngineStatus(Wire, frozen=True):
    """Sent after each step batch (at most every 20 ms) and at least once a second.
    available_tokens: KV tokens that it could take now: free in mapped pages, the ledger's room,
    evictable prefix cache. evictable_tokens: cached, unused. pending_prefill_tokens: of prompts,
    not yet computed. imported_tokens_total: KV that moved here."""

    engine_id: str
    model: str | None
    running: int = 0
    waiting: int = 0
    available_tokens: int = 0
    free_mapped_tokens: int = 0
    evictable_tokens: int = 0
    pending_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    kv_mapped_bytes: int = 0
    static_bytes: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    retractions_total: int = 0
    maps_total: int = 0
    unmaps_total: int = 0
    imported_tokens_total: int = 0


class EngineOutput(Wire, frozen=True):
    """What one or more steps produced."""

    chunks: list[Chunk] = []
    failures: list[Failure] = []


_Answer = Activated | ActivationFailed | Deactivated | Exported | EngineOutput
FromEngine = EngineHello | EngineStatus | _Answer

# --- agent <-> frontend --------------------------------------------------------------------

ToFrontend = EngineOutput
ToAgent = Cancel

# --- agent <-> cluster scheduler -----------------------------------------------------------


class ModelReport(Wire, frozen=True):
    """One model on one device. Totals only grow while the agent lives.

    state: "activating" | "active" | "draining" | "failed". stages_s: those of the last activation,
    in order, and "total"; "engine" and "shrink" are the waits for an engine and for memory;
    link_bytes: what it brought over each link, all ranks together. Other bytes: of one rank."""

    model: str
    state: str
    waiting: int = 0
    running: int = 0
    engine_id: str = ""
    engine_pid: int = 0
    last_request_unix_s: float = 0.0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    finished_total: int = 0
    failed_total: int = 0
    kv_mapped_bytes: int = 0
    kv_reserve_bytes: int = 0
    static_bytes: int = 0
    maps_total: int = 0
    unmaps_total: int = 0
    retractions_total: int = 0
    activation_s: float = 0.0
    error: str = ""
    stages_s: dict[str, float] = {}
    activations_total: int = 0
    peers: tuple[str, ...] = ()
    link_bytes: dict[str, int] = {}


class AgentReport(Wire, frozen=True):
    """Every `report_interval_s` and on each change. waiting_unplaced: of models not placed here."""

    device: str
    epoch: int
    time_unix_s: float
    capacity_bytes: int
    page_bytes: int
    reserved_bytes: int
    committed_bytes: int
    resident_bytes: int
    engines_free: int
    engines_starting: int
    engines_total: int
    models: list[ModelReport]
    engine_restarts_total: int = 0
    cancel_endpoint: str = ""
    waiting_unplaced: int = 0


class ActivateModel(Wire, frozen=True):
    action_id: int
    model: ModelSpec
    kv_limit_bytes: int | None = None
    reason: str = ""
    peers: tuple[str, ...] = ()


class EvictModel(Wire, frozen=True):
    """Stop admitting, wait for running requests (bounded), deactivate, return the engine. Requests
    still waiting here must already be routed elsewhere or stay queued as unplaced, and with
    move_running those that run go there, too, with their KV. targets: there, by rank."""

    action_id: int
    model: str
    reason: str = ""
    move_running: bool = False
    targets: tuple[str, ...] = ()


class PrefetchModel(Wire, frozen=True):
    """A hint: read the model's files into the machine's weight store. Answered when it is there."""

    action_id: int
    model: ModelSpec
    reason: str = ""


class TrimModel(Wire, frozen=True):
    action_id: int
    model: str | None = None


class Drain(Wire, frozen=True):
    """SIGTERM path: admit nothing more, finish what runs within `timeout_s`, then exit."""

    action_id: int
    timeout_s: float


class ActionResult(Wire, frozen=True):
    """The outcome of an action or an operator's command; failures are the next observation.
    stages_s, link_bytes: for an operator's "activate", of the model's last activation."""

    action_id: int
    ok: bool
    message: str = ""
    seconds: float = 0.0
    stages_s: dict[str, float] = {}
    link_bytes: dict[str, int] = {}


class OperatorCommand(Wire, frozen=True):
    """From `prism-serve activate|evict|prefetch|flush|status`. kind: one of these words;
    "status" (answers ActionResult with the ClusterStatus JSON as message)."""

    kind: str
    model: str | None = None
    device: str | None = None


ToScheduler = AgentReport | ActionResult | OperatorCommand
FromScheduler = ActivateModel | EvictModel | PrefetchModel | TrimModel | Drain | ActionResult


class ClusterStatus(Wire, frozen=True):
    """What the scheduler publishes in Redis each interval; frontends render /health and
    /metrics from it, tests and reports read counters from it. refusals: model -> why it cannot be
    placed now (what is missing and where)."""

    time_unix_s: float
    policy: str
    placement: dict[str, str]
    agents: list[AgentReport]
    kvpr: dict[str, float] = {}
    token_rates: dict[str, float] = {}
    unplaced: dict[str, int] = {}
    actions_total: dict[str, int] = {}
    ready: bool = False
    refusals: dict[str, str] = {}
