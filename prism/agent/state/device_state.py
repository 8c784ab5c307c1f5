"""State of the agent: time limits, engines, models and requests. For one event loop, no locks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from prism.agent.state.engine_pool import (
    Counters,
    EngineKind,
    EnginePool,
    EngineState,
    counters_of,
)
from prism.agent.state.request_table import RequestTable
from prism.config.schema.cluster_config import EngineConfig
from prism.messages.engine import EngineStatus
from prism.messages.model_spec import ModelSpec
from prism.scheduler.local_scheduler import LocalScheduler


@dataclass(frozen=True, slots=True)
class AgentTiming:
    """Time limits, in seconds."""

    lease_ttl_s: float = 5.0  # time until another agent can have the queue of a dead one
    lease_wait_s: float = 30.0  # wait for the expiry of an earlier agent's lease
    tick_s: float = 0.1  # interval of checks of time limits
    retry_s: float = 0.2  # pause after an error of Redis
    silent_s: float = 20.0  # an engine that sends nothing for this long is killed
    hello_s: float = 60.0  # the same while it starts, in addition to the time of its imports
    # The same while it loads a model and cannot send.
    activation_s: float = float(EngineConfig().activation_timeout_s)
    # A gap of this length between ticks means that the agent was suspended: the silence of engines
    # during the gap does not count.
    away_s: float = 2.0
    # Time that requests wait for a model that is not here: they often arrive before the
    # scheduler's order to activate it.
    absent_grace_s: float = 3.0
    failed_grace_s: float = 0.5  # the same for a model that failed
    failed_keep_s: float = 60.0  # time for which a model's failure is reported
    frontend_check_s: float = 1.0  # interval of checks of heartbeats
    frontend_missing_s: float = 3.0  # a frontend without a heartbeat for this long is dead
    reclaim_s: float = 1.0  # time for engines to return requested memory
    flush_s: float = 5.0  # time for an engine to return all idle memory
    memory_retry_s: float = 0.3  # pause before an activation that lacked memory is tried again
    memory_tries: int = 3  # number of such retries
    # A model whose engines die more than revives_max times in this window has failed.
    revive_window_s: float = 60.0
    revives_max: int = 3
    fork_retry_s: float = 0.5  # pause after an engine died before it was ready; doubles
    fork_retry_max_s: float = 30.0
    fork_server_stop_s: float = 15.0  # time for a fork server to end
    fork_answer_s: float = 10.0  # a fork server that takes longer for a fork hangs
    fork_ready_s: float = 300.0  # the same for its imports
    sweep_s: float = 30.0  # interval of checks for KV files that no engine fetched
    drift_s: float = 2.0  # interval of checks of the driver's figures of a GPU's memory
    overdraft_s: float = 10.0  # an engine that exceeds its lease for this long is replaced
    overdraft_pause_s: float = 60.0  # pause between two such replacements; doubles
    overdraft_pause_max_s: float = 1800.0
    export_s: float = 5.0  # time for requests to leave an engine that is replaced


class ModelState(Enum):
    """State of a model on the device. Values are those of `ModelReport.state`."""

    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class HostedModel:
    """Model on the device, in any state. Times are monotonic."""

    spec: ModelSpec
    since_s: float  # start of its state
    state: ModelState = ModelState.ACTIVATING
    kv_limit_bytes: int | None = None
    sent_limit_bytes: int | None = None  # limit that its engine has
    engine_id: str = ""  # empty while it waits for an engine
    not_before_s: float = 0.0  # earliest time of the next try
    memory_tries: int = 0  # tries that lacked memory, of this activation
    actions: list[int] = field(default_factory=list)  # ids to answer at the end of the state
    deaths_s: list[float] = field(default_factory=list)  # recent deaths of its engines
    suspects_s: float | None = None  # last of these that made requests suspects
    activation_s: float = 0.0  # duration of its last activation
    asked_s: float = 0.0  # when an engine was first ordered to activate it
    sent_s: float = 0.0  # when an engine was last ordered to activate it
    needs_fresh: bool = False  # True if it needs an engine that has served no model
    restarts: bool = False  # True if it needs an engine that has started since the order
    peers: tuple[str, ...] = ()  # devices of its other ranks
    stages_s: dict[str, float] = field(default_factory=dict)  # of its last activation
    deactivating: bool = False  # True if its engine was ordered to evict it
    finish_all: bool = False  # as in EvictModel
    sm_share: float = 1.0  # as in ActivateModel
    prefills: bool = False  # as in ActivateModel
    kv_target: str = ""  # device of another machine to which its requests' KV is sent
    error: str = ""
    broken: bool = False  # as in ModelReport

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ranks(self) -> int:
        """Number of its devices."""
        return 1 + len(self.peers)

    @property
    def takes_requests(self) -> bool:
        return self.state in (ModelState.ACTIVATING, ModelState.ACTIVE)

    @property
    def needs_engine(self) -> bool:
        return self.state is ModelState.ACTIVATING and not self.engine_id

    def become(self, state: ModelState, now_s: float) -> None:
        self.state, self.since_s = state, now_s

    def count_death(
        self, now_s: float, window_s: float, *, explained: bool, made_suspects: bool
    ) -> None:
        """Counts a death of its engine.

        If one of the requests explains it, neither this death nor the one that made the request a
        suspect counts. Other deaths count for `window_s`.
        """
        self.deaths_s = [t for t in self.deaths_s if t > now_s - window_s]
        if not explained:
            self.deaths_s.append(now_s)
            self.suspects_s = now_s if made_suspects else self.suspects_s
            return
        if self.suspects_s in self.deaths_s:
            self.deaths_s.remove(self.suspects_s)
        self.suspects_s = None


@dataclass(slots=True)
class ModelTotals:
    """Counters of one model since the agent started.

    maps, unmaps and retractions are sums over the engines that served it, since an engine's
    counters start at zero with its process.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    met: int = 0  # of the finished ones, those that met their end-to-end SLO
    failed: int = 0
    cancelled: int = 0
    maps: int = 0
    unmaps: int = 0
    retractions: int = 0
    activations: int = 0
    stages_s: Counter[str] = field(default_factory=Counter)  # of all activations
    last_request_unix_s: float = 0.0
    # As in ModelReport, at the present number of ranks.
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    request_s: float = 0.0
    # Bucket of a length -> requests, as in ModelReport.
    output_lengths: Counter[int] = field(default_factory=Counter)
    _seen: dict[str, Counters] = field(default_factory=dict)
    _ranks: int = 0

    def begin(self, engine_id: str, counters: Counters, ranks: int) -> None:
        """Sets the baseline of an engine that starts to serve the model: its present counters.
        Speeds of another number of ranks are forgotten."""
        self._seen = {engine_id: counters}
        if ranks != self._ranks:
            self.prefill_tokens_per_s = self.step_s = self.request_s = 0.0
        self._ranks = ranks

    def observe(self, status: EngineStatus) -> None:
        """Adds the growth of the counters since this engine's last status about this model."""
        now = counters_of(status)
        before = self._seen.get(status.engine_id, now)
        self._seen[status.engine_id] = now
        grown = [n - b if n >= b else n for n, b in zip(now, before, strict=True)]
        self.maps += grown[0]
        self.unmaps += grown[1]
        self.retractions += grown[2]
        if status.prefill_tokens_per_s > 0:
            self.prefill_tokens_per_s = status.prefill_tokens_per_s
        if status.step_s > 0:
            self.step_s, self.request_s = status.step_s, status.request_s


class Models:
    """Models by name: those on the device, and the totals of all that ever were."""

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
    """State shared by the agent's parts."""

    pool: EnginePool
    timing: AgentTiming = field(default_factory=AgentTiming)
    now_s: Callable[[], float] = time.monotonic  # monotonic clock
    models: Models = field(default_factory=Models)
    requests: RequestTable = field(default_factory=lambda: RequestTable(LocalScheduler()))
    controlled: bool = False  # True if the policy controls the engines' steps

    def kind_for(self, hosted: HostedModel) -> EngineKind:
        """Returns the kind of engine that serves this model."""
        return self.pool.kind(hosted.spec.adapter, hosted.peers)

    def next_kind(self, adapter: str = "") -> EngineKind | None:
        """Returns the kind of the next engine to fork if it is of this adapter, else None.

        Kinds for which a model waits come first, unless an engine of the kind is starting.

        Args:
            adapter: "" means the first one.
        """
        plain = self.pool.kind(adapter)
        missing = self._missing_kinds()
        if missing:
            return next((kind for kind in missing if kind.adapter == plain.adapter), None)
        return plain if self.pool.is_short_of(plain.adapter) else None

    def _missing_kinds(self) -> list[EngineKind]:
        coming = [e.kind for e in self.pool if e.state is EngineState.STARTING]
        missing = []
        for hosted in self.models.hosted.values():
            if not hosted.needs_engine:
                continue
            if (kind := self.kind_for(hosted)) in coming:
                coming.remove(kind)
            else:
                missing.append(kind)
        return missing
