"""All that the scheduler's process knows; nothing of it outlives the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from prism.cluster.agents import AgentBook
from prism.cluster.bars import Bars
from prism.cluster.changes import Changes
from prism.cluster.sizes import Sizes
from prism.cluster.timing import Timing
from prism.config import ClusterConfig
from prism.journal import Sink
from prism.policies.registry import Policy
from prism.scheduler.rates import TokenRates


@dataclass(frozen=True, slots=True)
class Move:
    """An action under way. kind: "activate" (on device), "evict" (from device), "migrate" (from
    source to device), "drop_copy" (a second copy on device goes; source keeps serving). peers: the
    devices of its other ranks, `device` being that of rank 0."""

    kind: str
    model: str
    device: str
    source: str | None = None
    peers: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.peers)

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
class State:
    """placement, unplaced: as last read from Redis. moves: at most one action per model.
    wanted: models to be resident although no request waits. demands: operators' activations
    that are not finished, model -> device or None. activated_s: when models became active.
    journal: None where none is kept.
    now_s: a monotonic clock, which all times `*_s` here are on. Whoever changes the state calls
    `changes.notify`."""

    config: ClusterConfig
    policy: Policy
    timing: Timing
    book: AgentBook
    rates: TokenRates
    bars: Bars
    sizes: Sizes
    now_s: Callable[[], float]
    changes: Changes
    started_s: float
    placement: dict[str, str] = field(default_factory=dict)
    unplaced: dict[str, int] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    demands: dict[str, str | None] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    activated_s: dict[str, float] = field(default_factory=dict)
    actions_total: Counter[str] = field(default_factory=Counter)
    planned_once: bool = False
    started_all: bool = False
    journal: Sink | None = None


def new_state(
    config: ClusterConfig, policy: Policy, timing: Timing, now_s: Callable[[], float]
) -> State:
    """The state of a scheduler that has heard of nobody yet."""
    started_s = now_s()
    devices = [device.name for device in config.devices]
    return State(
        config=config,
        policy=policy,
        timing=timing,
        book=AgentBook(devices, started_s, timing.start_grace_s),
        rates=TokenRates(config.scheduler.rate_window_s),
        bars=Bars(timing),
        sizes=Sizes(config, learn=policy.evicts),
        now_s=now_s,
        changes=Changes(),
        started_s=started_s,
    )
