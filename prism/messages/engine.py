"""Messages between an agent and its engines."""

from __future__ import annotations

from typing import Literal

from prism.messages import Wire
from prism.messages.gpu_memory import OutsideMemory
from prism.messages.image_tensors import Tensors
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Cancel, EngineOutput, Request

Phase = Literal["prefill", "decode"]

# --- agent -> engine -----------------------------------------------------------------------


class ActivateEngine(Wire, frozen=True, tag="Activate"):
    """Order to load a model and serve it."""

    model: ModelSpec
    kv_limit_bytes: int | None = None  # limit of elastic memory; None: the device's memory
    max_running: int = 32
    fingerprint: tuple[int, ...] = ()  # expected tokens of the warm-up; empty: any
    controlled: bool = False  # True: the engine steps only for jobs (`StartJob`)


class Deactivate(Wire, frozen=True):
    """Order to return every page and wait for the next model. Running requests fail."""


class Submit(Wire, frozen=True):
    """Requests for the engine to run."""

    requests: list[Request]
    images: dict[str, Tensors] = {}  # those that the requests lack, by digest


class Export(Wire, frozen=True):
    """Order to stop all requests and return them with their progress."""

    # Devices whose ranks are offered the KV. (): KV goes into files. None: without KV.
    targets: tuple[str, ...] | None = ()


class PauseRequests(Wire, frozen=True):
    """Order to take requests out of the next steps. They keep their KV. Unknown ids are ignored."""

    request_ids: list[str]


class ResumeRequests(Wire, frozen=True):
    """Order to continue paused requests."""

    request_ids: list[str]


class StartJob(Wire, frozen=True):
    """Order to step requests of a controlled engine, and no others.

    A prefill steps until each request has its next token. An engine runs one job at a time: a
    prefill precedes decode steps, which continue after it.
    """

    phase: Phase
    request_ids: list[str]
    steps: int = 0  # decode steps; 0: until `EndRun`


class EndRun(Wire, frozen=True):
    """Order to end the decode job with its present step. Ignored if there is none."""


class SetLimit(Wire, frozen=True):
    """Order to change the limit of KV memory."""

    kv_limit_bytes: int | None


class Shutdown(Wire, frozen=True):
    """Order to finish nothing, free everything and exit with code 0."""


_Order = ActivateEngine | Deactivate | Export | SetLimit | Shutdown
_Steps = PauseRequests | ResumeRequests | StartJob | EndRun
ToEngine = _Order | Submit | Cancel | _Steps

# --- engine -> agent -----------------------------------------------------------------------


class EngineHello(Wire, frozen=True):
    engine_id: str
    pid: int


class Activated(Wire, frozen=True):
    """The model has answered its warm-up."""

    model: str
    quantum_bytes: int  # granularity of its KV memory
    quantum_tokens: int
    floor_bytes: int  # KV that stays resident while it is active (the padding block)
    reserve_bytes: int  # KV guaranteed to it: one request of full context can always finish
    static_bytes: int
    block_tokens: int
    max_running: int
    stages_s: dict[str, float] = {}  # seconds of each stage in order, and "total"
    fingerprint: tuple[int, ...] = ()  # tokens of the warm-up
    link_bytes: dict[str, int] = {}  # weights over each GPU's link to the host; "host": no GPU
    # What a request takes outside of the main pool: see `prism.policies.data.RequestNeed`.
    window_tokens: int = 0
    window_share: float = 0.0
    state_tokens: int = 0


class ActivationFailed(Wire, frozen=True):
    model: str
    message: str
    missing_bytes: int = 0  # 0: memory is not the cause
    needs_fresh_engine: bool = False  # the engine failed its self-check


class Deactivated(Wire, frozen=True):
    model: str
    seconds: float


class Exported(Wire, frozen=True):
    """Requests that were stopped, each with its `resume`. None of them is on the engine any
    more."""

    requests: list[Request]


class JobEnded(Wire, frozen=True):
    """End of a job, after its tokens."""

    phase: Phase
    seconds: float  # total time of its steps
    steps: int
    # True if it could not continue for lack of memory. Its requests stay in the engine.
    lacks_memory: bool = False


class EngineStatus(Wire, frozen=True):
    """State of an engine. Sent after each step batch (at most every 20 ms) and at least once a
    second."""

    engine_id: str
    model: str | None
    running: int = 0
    waiting: int = 0
    # KV tokens that it could store now: in mapped pages, ledger headroom and evictable blocks.
    available_tokens: int = 0
    free_mapped_tokens: int = 0
    evictable_tokens: int = 0  # unused tokens of the prefix cache
    pending_prefill_tokens: int = 0  # prompt tokens that are not computed yet
    prefill_tokens_per_s: float = 0.0
    # A decode step of n requests takes step_s + n x request_s; 0: not measured yet.
    step_s: float = 0.0
    request_s: float = 0.0
    kv_mapped_bytes: int = 0
    static_bytes: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    retractions_total: int = 0
    maps_total: int = 0
    unmaps_total: int = 0
    imported_tokens_total: int = 0  # tokens whose KV was moved here
    outside: OutsideMemory | None = None
    captures_s: tuple[float, ...] = ()  # durations of captures of decode graphs
    malformed_total: int = 0  # dropped messages, and KV fetchers that were disconnected


_Answer = Activated | ActivationFailed | Deactivated | Exported | EngineOutput | JobEnded
FromEngine = EngineHello | EngineStatus | _Answer
