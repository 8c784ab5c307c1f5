"""What operators and frontends learn from the cluster scheduler, and what operators ask of it."""

from __future__ import annotations

from prism.messages import Wire
from prism.messages.agent import AgentReport, FromAgent


class OperatorCommand(Wire, frozen=True):
    """From `prism-serve activate|evict|prefetch|flush|status`, answered by an ActionResult."""

    kind: str  # one of these words; "status" answers with ClusterStatus as JSON in the message
    model: str | None = None
    device: str | None = None


ToScheduler = FromAgent | OperatorCommand


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
    # Part -> what is wrong with it. The rest of the cluster goes on.
    degraded: dict[str, str] = {}
