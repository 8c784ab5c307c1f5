"""Messages between agents and the cluster scheduler."""

from __future__ import annotations

from prism.messages import Wire
from prism.messages.gpu_memory import GpuMemory
from prism.messages.model_spec import ModelSpec

# --- agent -> scheduler --------------------------------------------------------------------


class ModelReport(Wire, frozen=True):
    """State of one model on one device. Totals only grow while the agent lives. Bytes are of one
    rank, except `link_bytes`."""

    model: str
    state: str  # "activating" | "active" | "draining" | "failed"
    waiting: int = 0
    running: int = 0
    engine_id: str = ""
    engine_pid: int = 0
    last_request_unix_s: float = 0.0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    finished_total: int = 0
    failed_total: int = 0
    cancelled_total: int = 0
    kv_mapped_bytes: int = 0
    kv_cached_bytes: int = 0  # part of kv_mapped_bytes: prefix cache, unused by running requests
    kv_idle_bytes: int = 0  # part of kv_mapped_bytes: holds no tokens
    kv_reserve_bytes: int = 0
    static_bytes: int = 0
    maps_total: int = 0
    unmaps_total: int = 0
    retractions_total: int = 0
    activation_s: float = 0.0
    error: str = ""
    # Seconds of the last activation's stages in order, and "total". "engine" and "shrink" are waits
    # for an engine and for memory.
    stages_s: dict[str, float] = {}
    activations_total: int = 0
    stages_total_s: dict[str, float] = {}  # stages_s, summed over all activations
    peers: tuple[str, ...] = ()  # devices of the ranks above 0
    link_bytes: dict[str, int] = {}  # loaded over each link by the last activation, all ranks
    oldest_wait_s: float = 0.0  # wait of its oldest waiting request
    # Measured; 0: not yet. A decode step of n requests takes step_s + n x request_s.
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    request_s: float = 0.0
    # (bucket of a length (prism/scheduler/traffic.py), requests that ended since the agent
    # started). Not a mapping, since keys of JSON are text.
    output_lengths: list[tuple[int, int]] = []
    met_total: int = 0  # finished requests that met their end-to-end SLO
    broken: bool = False  # a live engine failed to load it, and not for lack of memory
    has_output: bool = False  # a request has had a token since it was activated
    starting: int = 0  # part of `running` that has had no token here

    @property
    def tp(self) -> int:
        """Number of its devices."""
        return 1 + len(self.peers)


class AgentReport(Wire, frozen=True):
    """State of a device. Sent every `report_interval_s` and on each change."""

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
    waiting_unplaced: int = 0  # queued requests for models that are not on this device
    gpu: GpuMemory | None = None
    malformed_total: int = 0  # messages that the agent dropped


class ActionResult(Wire, frozen=True):
    """Outcome of an action or an operator's command."""

    action_id: int
    ok: bool
    message: str = ""
    lasting: bool = False  # the model cannot be loaded, and not for lack of memory
    seconds: float = 0.0
    stages_s: dict[str, float] = {}  # of an operator's "activate": stages of the activation
    link_bytes: dict[str, int] = {}  # of an operator's "activate": bytes over each link


FromAgent = AgentReport | ActionResult

# --- scheduler -> agent --------------------------------------------------------------------


class ActivateModel(Wire, frozen=True):
    """Order to load a model and serve it."""

    action_id: int
    model: ModelSpec
    kv_limit_bytes: int | None = None
    reason: str = ""
    peers: tuple[str, ...] = ()
    sm_share: float = 1.0  # part of the devices' compute for its decode steps (MuxServe §3.4)
    restarts_engine: bool = False  # an engine is started for it, instead of reusing one
    # Each request leaves with its KV after its first token, and the next one starts then.
    prefills: bool = False


class EvictModel(Wire, frozen=True):
    """Order to stop admission, wait for running requests, deactivate, and return the engine.
    Requests that wait here must have been routed elsewhere, or stay queued as unplaced."""

    action_id: int
    model: str
    reason: str = ""
    move_running: bool = False  # running requests continue on `targets`
    targets: tuple[str, ...] = ()  # device of each rank
    # Running requests finish, however long they take. False: for at most engine.drain_timeout.
    finish_all: bool = False


class PrefetchModel(Wire, frozen=True):
    """Hint to read the model's files into the machine's weight store. Answered when they are
    there."""

    action_id: int
    model: ModelSpec
    reason: str = ""


class TrimModel(Wire, frozen=True):
    """Order to return idle memory of one model, or of all."""

    action_id: int
    model: str | None = None


class Drain(Wire, frozen=True):
    """Order to admit no requests, finish running ones within `timeout_s`, and exit (SIGTERM)."""

    action_id: int
    timeout_s: float


AgentCommand = ActivateModel | EvictModel | PrefetchModel | TrimModel | Drain
FromScheduler = AgentCommand | ActionResult
