"""Messages between the ranks of one engine, based on those between agent and worker."""

from __future__ import annotations

from prism.messages import Wire
from prism.messages.engine import (
    Activated,
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    EngineStatus,
    Export,
    Exported,
    PauseRequests,
    ResumeRequests,
    SetLimit,
    Shutdown,
    Submit,
)
from prism.messages.requests import Cancel


class Vote(Wire, frozen=True):
    """Value of one rank; from rank 0, the smallest value of all ranks."""

    value: int


class ActivationVote(Wire, frozen=True):
    """Outcome of an activation. If it is not ok, ranks with an active model deactivate it."""

    # True if the model is active on all ranks.
    ok: bool


class RankStep(Wire, frozen=True):
    """Order to run one continuous-batching step."""


class Shrink(Wire, frozen=True):
    """Call of `EngineCore.shrink`."""

    size_bytes: int | None


class AskStatus(Wire, frozen=True):
    """Request for a RankStatus."""


class RankStatus(Wire, frozen=True):
    status: EngineStatus
    # True if the ledger has asked this rank for memory since the last RankStatus.
    asked: bool = False
    # Bytes that it asked for; None: as many as possible.
    asked_bytes: int | None = None
    # Value of `EngineCore.handing_over`.
    handing_over: bool = False


FromLeader = (
    ActivateEngine
    | Deactivate
    | Submit
    | Cancel
    | PauseRequests
    | ResumeRequests
    | Export
    | SetLimit
    | Shutdown
    | Vote
    | ActivationVote
    | RankStep
    | Shrink
    | AskStatus
)
FromFollower = Vote | Exported | Activated | ActivationFailed | RankStatus
