"""What agents and the cluster scheduler say to each other."""

from __future__ import annotations

from prism.messages import Wire
from prism.messages.gpu import GpuMemory
from prism.messages.models import ModelSpec

# --- agent -> scheduler --------------------------------------------------------------------


class ModelReport(Wire, frozen=True):
    """One model on one device. Totals only grow while the agent lives. Bytes are of one rank,
    except link_bytes."""

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
    kv_cached_bytes: int = 0  # of kv_mapped_bytes: kept for prompts that begin alike, unused now
    kv_idle_bytes: int = 0  # of kv_mapped_bytes: no token's
    kv_reserve_bytes: int = 0
    static_bytes: int = 0
    maps_total: int = 0
    unmaps_total: int = 0
    retractions_total: int = 0
    activation_s: float = 0.0
    error: str = ""
    # Of the last activation, in order, and "total"; "engine" and "shrink" are the waits for an
    # engine and for memory.
    stages_s: dict[str, float] = {}
    activations_total: int = 0
    stages_total_s: dict[str, float] = {}  # stages_s, summed over all activations
    peers: tuple[str, ...] = ()
    link_bytes: dict[str, int] = {}  # brought over each link by the last activation, all ranks
    oldest_wait_s: float = 0.0  # of its waiting requests
    broken: bool = False  # an engine that lives could not load it, and not for lack of memory


class AgentReport(Wire, frozen=True):
    """Sent every `report_interval_s` and on each change."""

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
    waiting_unplaced: int = 0  # requests here for models that are not placed here
    gpu: GpuMemory | None = None
    malformed_total: int = 0  # messages that the agent dropped


class ActionResult(Wire, frozen=True):
    """The outcome of an action or an operator's command; failures are the next observation."""

    action_id: int
    ok: bool
    message: str = ""
    seconds: float = 0.0
    stages_s: dict[str, float] = {}  # for an operator's "activate": of the last activation
    link_bytes: dict[str, int] = {}  # the same


FromAgent = AgentReport | ActionResult

# --- scheduler -> agent --------------------------------------------------------------------


class ActivateModel(Wire, frozen=True):
    action_id: int
    model: ModelSpec
    kv_limit_bytes: int | None = None
    reason: str = ""
    peers: tuple[str, ...] = ()


class EvictModel(Wire, frozen=True):
    """Stop admitting, wait for running requests (bounded), deactivate, return the engine.

    Requests that still wait here must already be routed elsewhere or stay queued as unplaced.
    """

    action_id: int
    model: str
    reason: str = ""
    move_running: bool = False  # running requests go on at `targets`
    targets: tuple[str, ...] = ()  # devices by rank


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


AgentCommand = ActivateModel | EvictModel | PrefetchModel | TrimModel | Drain
FromScheduler = AgentCommand | ActionResult
