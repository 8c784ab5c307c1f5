"""All that the scheduler's process knows. Nothing of it outlives the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from prism.cluster.agents import AgentBook
from prism.cluster.backoff import ActivationBackoff
from prism.cluster.changes import Changes
from prism.cluster.decisions import Decisions
from prism.cluster.sizes import Sizes
from prism.cluster.timing import SchedulerTiming
from prism.config.schema import ClusterConfig
from prism.policies.policy import Policy
from prism.scheduler.journal import Sink
from prism.scheduler.rates import TokenRates


@dataclass(frozen=True, slots=True)
class Move:
    """An action under way.

    kind: "activate" (on device), "evict" (from device), "migrate" (from source to device), or
    "drop_copy" (a second copy on device goes; source keeps serving).
    """

    kind: str
    model: str
    device: str  # of rank 0
    source: str | None = None
    peers: tuple[str, ...] = ()  # devices of the other ranks, and of copies that leave with it

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.peers)

    @property
    def routes(self) -> frozenset[str]:
        """Devices that the action itself begins or ends to route to."""
        source = (self.source,) if self.kind == "migrate" and self.source else ()
        return frozenset((*self.devices, *source))

    @property
    def brings_up(self) -> bool:
        return self.kind in ("activate", "migrate")

    @property
    def ends(self) -> tuple[str, str]:
        """(device, target) as a journal has them: where the action begins, and a move's end."""
        if self.kind == "migrate":
            return self.source or "", self.device
        return self.device, ""


@dataclass(slots=True)
class SchedulerState:
    """A change of the state that plans depend on is followed by `changes.notify`."""

    config: ClusterConfig
    policy: Policy
    timing: SchedulerTiming
    book: AgentBook
    rates: TokenRates
    backoff: ActivationBackoff
    sizes: Sizes
    now_s: Callable[[], float]  # a monotonic clock, of which all times `*_s` here are
    changes: Changes
    started_s: float
    # Model -> devices of its copies, as last read from Redis.
    placement: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unplaced: dict[str, int] = field(default_factory=dict)  # as last read from Redis
    moves: dict[str, Move] = field(default_factory=dict)  # by model
    # Model -> devices of copies that their agent brings up again while others serve.
    reviving: dict[str, frozenset[str]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)  # to be resident although no request waits
    # Operators' activations that are not finished: model -> device or None.
    demands: dict[str, str | None] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)  # devices; operators say which
    # Those that the next scheduler will find in Redis. None: what this one finds is not read yet.
    kept_drained: frozenset[str] | None = None
    refusals: dict[str, str] = field(default_factory=dict)
    activated_s: dict[str, float] = field(default_factory=dict)  # when models became active
    # When models have been up for as long as they took to load, and how long that was.
    repaid_s: dict[str, float] = field(default_factory=dict)
    load_s: dict[str, float] = field(default_factory=dict)
    actions_total: Counter[str] = field(default_factory=Counter)
    decisions: Decisions = field(default_factory=Decisions)
    planned_once: bool = False
    # The cluster was ready once, perhaps under a scheduler before this one.
    started_all: bool = False
    journal: Sink | None = None  # None: no journal is kept
    # Models that a reload has removed and that requests are open for; `config.models` has them.
    leaving: set[str] = field(default_factory=set)
    revision: int = -1  # of the configuration that all frontends work with, too; -1: not asked yet

    def serve(self, config: ClusterConfig) -> None:
        """`config` from now on. What is on its way or known of models that stay is kept."""
        self.config = structs.replace(config, models=[*config.models, *config.leaving])
        self.leaving = {model.name for model in config.leaving}
        self.sizes.add(self.config)
        self.book.serve(device.name for device in config.devices)
        self.drained &= {device.name for device in config.devices}
        self.rates.window_s = config.scheduler.rate_window_s


def new_state(
    config: ClusterConfig, policy: Policy, timing: SchedulerTiming, now_s: Callable[[], float]
) -> SchedulerState:
    """The state of a scheduler that has heard from no agent yet."""
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
