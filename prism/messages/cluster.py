"""Messages between the cluster scheduler and operators or frontends."""

from __future__ import annotations

from prism.messages import Wire
from prism.messages.agent import AgentReport, FromAgent
from prism.messages.external import ExternalServer, ServerLoad


class OperatorCommand(Wire, frozen=True):
    """Command of `prism-serve activate|evict|prefetch|flush|drain|undrain|status`. The answer is an
    ActionResult."""

    kind: str  # one of these words; the answer to "status" has a ClusterStatus as JSON
    model: str | None = None
    device: str | None = None


ToScheduler = FromAgent | OperatorCommand


class FrontendState(Wire, frozen=True):
    """State that a frontend sends with each heartbeat."""

    revision: int = 0  # of the configuration that the frontend uses
    leaving: list[str] = []  # removed models that have open requests here
    # Model -> requests that have arrived here, also those that were rejected, by bucket of their
    # prompt's length (prism/scheduler/traffic.py).
    arrivals: dict[str, dict[int, int]] = {}
    # Server's URL -> open requests that this frontend passed on to it.
    external: dict[str, ServerLoad] = {}


class Decision(Wire, frozen=True):
    """A change of a model's placement, and its outcome.

    `kind` is "activate" or "drop_copy" on `device`, "evict" from `device`, or "migrate" from
    `device` to `target`.
    """

    time_unix_s: float  # begin
    kind: str
    model: str
    device: str
    target: str = ""
    reason: str = ""
    problem: str = ""  # reason of a failure
    seconds: float | None = None  # duration; None: in progress


class ClusterStatus(Wire, frozen=True):
    """Status that the scheduler publishes in Redis each interval. Frontends render /health and
    /metrics from it, and tests read counters from it."""

    time_unix_s: float
    policy: str
    placement: dict[str, str]
    agents: list[AgentReport]
    models: list[str] = []  # all of the configuration, in its order
    kvpr: dict[str, float] = {}
    token_rates: dict[str, float] = {}
    unplaced: dict[str, int] = {}
    actions_total: dict[str, int] = {}
    ready: bool = False
    refusals: dict[str, str] = {}  # model -> reason why it cannot be placed now
    malformed_total: int = 0  # messages that the scheduler dropped
    # Process, device or model -> its problem. The rest of the cluster works.
    degraded: dict[str, str] = {}
    decisions: list[Decision] = []  # the latest, ordered by begin
    # Model -> devices, for models with several copies. `placement` has the first copy.
    copies: dict[str, tuple[str, ...]] = {}
    # Revision of the configuration that the scheduler and all frontends use; -1: just started.
    revision: int = 0
    leaving: list[str] = []  # removed models that still have requests
    # Drained device -> what is still on it; empty: nothing.
    drained: dict[str, str] = {}
    node: str = ""  # node of the leading scheduler, in a cluster of several machines
    # Models in `refusals` whose requests are rejected at once, since the devices are overloaded.
    overload: list[str] = []
    external: list[ExternalServer] = []  # in the order of the configuration
