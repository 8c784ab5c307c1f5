"""What the agent knows of its device: time limits, models, requests. One event loop, no locks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from prism.agent.pool import Counters, EnginePool, counters_of
from prism.agent.requests import RequestTable
from prism.config.schema import EngineConfig
from prism.messages.engine import EngineStatus
from prism.messages.models import ModelSpec
from prism.scheduler.local import LocalScheduler


@dataclass(frozen=True, slots=True)
class AgentTiming:
    """Time limits, in seconds."""

    lease_ttl_s: float = 5.0  # after the agent's death the queue is free for another this late
    lease_wait_s: float = 30.0  # for an earlier agent's lease to run out
    tick_s: float = 0.1  # between two looks at time limits
    retry_s: float = 0.2  # after Redis did not answer
    silent_s: float = 20.0  # an engine that sends nothing for so long is killed
    hello_s: float = 60.0  # the same while it starts, beside the time that imports take
    # The same while it loads a model and cannot send.
    activation_s: float = float(EngineConfig().activation_timeout_s)
    # If ticks are this far apart, the agent itself was suspended: engines' silence during the gap
    # does not count.
    away_s: float = 2.0
    # Requests wait so long for a model that is not here: the queue is often faster than the
    # scheduler's order to activate.
    absent_grace_s: float = 3.0
    failed_grace_s: float = 0.5  # the same for a model that failed
    failed_keep_s: float = 60.0  # so long its failure is reported
    frontend_check_s: float = 1.0
    frontend_missing_s: float = 3.0  # a frontend without a heartbeat for so long is dead
    reclaim_s: float = 1.0  # an engine that answers later is not counted on for memory
    flush_s: float = 5.0  # for an engine to give everything back
    memory_retry_s: float = 0.3  # before an activation that lacked memory is tried again
    memory_tries: int = 3
    # A model whose engines die more than revives_max times in this window has failed.
    revive_window_s: float = 60.0
    revives_max: int = 3
    fork_retry_s: float = 0.5  # after an engine died before it was ready; doubles
    fork_retry_max_s: float = 30.0
    fork_server_stop_s: float = 15.0
    fork_answer_s: float = 10.0  # a fork server that has not forked by then hangs
    fork_ready_s: float = 300.0  # the same while it imports
    sweep_s: float = 30.0  # between two looks for KV files that no engine fetched
    drift_s: float = 2.0  # between two questions to the driver about a GPU's memory
    overdraft_s: float = 10.0  # an engine beyond its lease for so long is replaced
    overdraft_pause_s: float = 60.0  # between two such replacements; doubles
    overdraft_pause_max_s: float = 1800.0
    export_s: float = 5.0  # for requests to leave an engine that is replaced


class ModelState(Enum):
    """Values are those of `ModelReport.state`."""

    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class HostedModel:
    """One model that is here, coming, going or failed. Times are monotonic."""

    spec: ModelSpec
    since_s: float
    state: ModelState = ModelState.ACTIVATING
    kv_limit_bytes: int | None = None
    sent_limit_bytes: int | None = None
    engine_id: str = ""  # empty while it waits for an engine
    not_before_s: float = 0.0  # the next try
    memory_tries: int = 0
    actions: list[int] = field(default_factory=list)  # answered when the present state ends
    deaths_s: list[float] = field(default_factory=list)
    suspects_s: float | None = None  # the last death that made suspects
    activation_s: float = 0.0
    asked_s: float = 0.0  # when an engine was asked to activate it for the first time
    sent_s: float = 0.0  # and for the last time
    needs_fresh: bool = False  # only an engine that has served nothing yet may have it
    peers: tuple[str, ...] = ()  # only an engine whose other ranks run on these devices may
    stages_s: dict[str, float] = field(default_factory=dict)
    deactivating: bool = False
    kv_target: str = ""  # a device of another machine, where its requests go on with their KV
    error: str = ""
    broken: bool = False  # as in ModelReport

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def takes_requests(self) -> bool:
        return self.state in (ModelState.ACTIVATING, ModelState.ACTIVE)

    @property
    def needs_engine(self) -> bool:
        return self.state is ModelState.ACTIVATING and not self.engine_id


@dataclass(slots=True)
class ModelTotals:
    """Counts of one model since the agent started; they only grow.

    maps, unmaps and retractions are sums over the engines that served it: an engine's own
    counters start at zero with its process.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    maps: int = 0
    unmaps: int = 0
    retractions: int = 0
    activations: int = 0
    stages_s: Counter[str] = field(default_factory=Counter)  # of all activations
    last_request_unix_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    _seen: dict[str, Counters] = field(default_factory=dict)

    def begin(self, engine_id: str, counters: Counters) -> None:
        """This engine starts to serve the model; `counters` are what it has counted so far."""
        self._seen = {engine_id: counters}

    def observe(self, status: EngineStatus) -> None:
        """Take over what grew since this engine's last status about this model."""
        now = counters_of(status)
        before = self._seen.get(status.engine_id, now)
        self._seen[status.engine_id] = now
        grown = [n - b if n >= b else n for n, b in zip(now, before, strict=True)]
        self.maps += grown[0]
        self.unmaps += grown[1]
        self.retractions += grown[2]
        if status.prefill_tokens_per_s > 0:
            self.prefill_tokens_per_s = status.prefill_tokens_per_s


class Models:
    """name -> HostedModel, and name -> ModelTotals of every model ever seen here."""

    def __init__(self) -> None:
        self.hosted: dict[str, HostedModel] = {}
        self._totals: dict[str, ModelTotals] = {}

    def totals(self, name: str) -> ModelTotals:
        if name not in self._totals:
            self._totals[name] = ModelTotals()
        return self._totals[name]

    def active(self, name: str) -> HostedModel | None:
        hosted = self.hosted.get(name)
        return hosted if hosted and hosted.state is ModelState.ACTIVE else None

    def on_engine(self, engine_id: str) -> HostedModel | None:
        return next((s for s in self.hosted.values() if s.engine_id == engine_id), None)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """now_s: monotonic clock."""

    pool: EnginePool
    timing: AgentTiming = field(default_factory=AgentTiming)
    now_s: Callable[[], float] = time.monotonic
    models: Models = field(default_factory=Models)
    requests: RequestTable = field(default_factory=lambda: RequestTable(LocalScheduler()))
