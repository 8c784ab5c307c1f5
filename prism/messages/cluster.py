"""What operators and frontends learn from the cluster scheduler, and what operators ask of it."""

from __future__ import annotations

from prism.messages import Wire
from prism.messages.agent import AgentReport, FromAgent


class OperatorCommand(Wire, frozen=True):
    """From `prism-serve activate|evict|prefetch|flush|drain|undrain|status`, answered by an
    ActionResult."""

    kind: str  # one of these words; "status" answers with ClusterStatus as JSON in the message
    model: str | None = None
    device: str | None = None


ToScheduler = FromAgent | OperatorCommand


class FrontendState(Wire, frozen=True):
    """What a frontend says with each heartbeat."""

    revision: int = 0  # of the configuration that it works with
    leaving: list[str] = []  # models that are not in it, and whose requests are open here


class Decision(Wire, frozen=True):
    """A move of a model, and how it went. `kind`: "activate" and "drop_copy" on `device`, "evict"
    from there, or "migrate" from there to `target`."""

    time_unix_s: float  # when it began
    kind: str
    model: str
    device: str
    target: str = ""
    reason: str = ""
    problem: str = ""  # why it failed
    seconds: float | None = None  # None: it is under way


class ClusterStatus(Wire, frozen=True):
    """What the scheduler publishes in Redis each interval. Frontends render /health and /metrics
    from it; tests read counters from it."""

    time_unix_s: float
    policy: str
    placement: dict[str, str]
    agents: list[AgentReport]
    kvpr: dict[str, float] = {}
    token_rates: dict[str, float] = {}
    unplaced: dict[str, int] = {}
    actions_total: dict[str, int] = {}
    ready: bool = False
    refusals: dict[str, str] = {}  # model -> why it has no place now
    malformed_total: int = 0  # messages that the scheduler dropped
    # Part, device or model -> what is wrong with it. The rest of the cluster goes on.
    degraded: dict[str, str] = {}
    decisions: list[Decision] = []  # the latest ones, in the order in which they began
    # Model -> devices, of models with several copies; `placement` has the first one.
    copies: dict[str, tuple[str, ...]] = {}
    # Of the configuration that the scheduler and all frontends work with; -1: it has just begun.
    revision: int = 0
    leaving: list[str] = []  # models that are not in it any more, and are still here
    # Device -> what is still there, of those on which nothing is placed; empty: nothing is.
    drained: dict[str, str] = {}
    node: str = ""  # of several machines the one whose scheduler plans
