"""State of the scheduler's process. It is lost with the process and rebuilt from reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from prism.cluster.state.agents import AgentBook
from prism.cluster.state.backoff import ActivationBackoff
from prism.cluster.state.changes import Changes
from prism.cluster.state.decisions import Decisions
from prism.cluster.state.sizes import Sizes
from prism.cluster.state.timing import SchedulerTiming
from prism.config.schema.cluster_config import ClusterConfig
from prism.policies.policy import Policy
from prism.scheduler.journal import Sink
from prism.scheduler.rates import TokenRates


@dataclass(frozen=True, slots=True)
class Move:
    """Action in progress."""

    # "activate" (on device), "evict" (from device), "migrate" (from source to device), or
    # "drop_copy" (evicts a second copy from device; source keeps serving).
    kind: str
    model: str
    device: str  # of rank 0
    source: str | None = None
    # Devices of the other ranks, and of copies that are evicted by the same action.
    peers: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.peers)

    @property
    def routes(self) -> frozenset[str]:
        """Devices that the action itself adds to the route or removes from it."""
        source = (self.source,) if self.kind == "migrate" and self.source else ()
        return frozenset((*self.devices, *source))

    @property
    def brings_up(self) -> bool:
        return self.kind in ("activate", "migrate")

    @property
    def source_and_target(self) -> tuple[str, str]:
        """(device, target) in the journal's terms; target is "" unless this is a migration."""
        if self.kind == "migrate":
            return self.source or "", self.device
        return self.device, ""


@dataclass(slots=True)
class SchedulerState:
    """State that the parts of the scheduler share.

    Call `changes.notify` after each change that plans depend on.
    """

    config: ClusterConfig
    policy: Policy
    timing: SchedulerTiming
    book: AgentBook
    rates: TokenRates
    backoff: ActivationBackoff
    sizes: Sizes
    now_s: Callable[[], float]  # monotonic clock; all times `*_s` here are on this clock
    changes: Changes
    started_s: float
    # Model -> devices of its copies, as last read from Redis.
    placement: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Model -> number of requests in the unplaced queue, as last read from Redis.
    unplaced: dict[str, int] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)  # actions in progress, by model
    # Model -> devices of copies that their agent restarts while other copies serve.
    reviving: dict[str, frozenset[str]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)  # models to activate although no request waits
    # Operators' unfinished activations: model -> device, or None for any.
    demands: dict[str, str | None] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)  # devices that operators drained
    # Drained devices as stored in Redis, where a restarted scheduler reads them. None: not read.
    kept_drained: frozenset[str] | None = None
    refusals: dict[str, str] = field(default_factory=dict)  # model -> reason
    activated_s: dict[str, float] = field(default_factory=dict)  # model -> last activation
    # Model -> time at which it has been active for as long as its last activation took.
    repaid_s: dict[str, float] = field(default_factory=dict)
    load_s: dict[str, float] = field(default_factory=dict)  # model -> its last activation's length
    actions_total: Counter[str] = field(default_factory=Counter)
    decisions: Decisions = field(default_factory=Decisions)
    planned_once: bool = False
    started_all: bool = False  # the cluster was ready once, perhaps under an earlier scheduler
    journal: Sink | None = None  # None: no journal is written
    # Models that a reload removed but that have open requests; `config.models` includes them.
    leaving: set[str] = field(default_factory=set)
    revision: int = -1  # oldest that the scheduler or a frontend uses; -1: not known yet

    def serve(self, config: ClusterConfig) -> None:
        """Replaces the configuration. State of models and devices that remain is kept."""
        self.config = structs.replace(config, models=[*config.models, *config.leaving])
        self.leaving = {model.name for model in config.leaving}
        self.sizes.add(self.config)
        self.book.serve(device.name for device in config.devices)
        self.drained &= {device.name for device in config.devices}
        self.rates.window_s = config.scheduler.rate_window_s


def new_state(
    config: ClusterConfig, policy: Policy, timing: SchedulerTiming, now_s: Callable[[], float]
) -> SchedulerState:
    """Returns the state of a scheduler that has not received a report yet."""
    started_s = now_s()
    devices = [device.name for device in config.devices]
    state = SchedulerState(
        config=config,
        policy=policy,
        timing=timing,
        book=AgentBook(devices, started_s, timing.start_grace_s, timing.activation_s),
        rates=TokenRates(config.scheduler.rate_window_s),
        backoff=ActivationBackoff(timing),
        sizes=Sizes(config, learn=policy.evicts),
        now_s=now_s,
        changes=Changes(),
        started_s=started_s,
    )
    state.serve(config)
    return state
