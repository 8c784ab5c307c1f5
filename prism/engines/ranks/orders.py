"""What the ranks of one engine say to each other, in the terms of the worker's own messages."""

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
    SetLimit,
    Shutdown,
    Submit,
)
from prism.messages.requests import Cancel


class Vote(Wire, frozen=True):
    """One rank's value, or to the others the smallest of all."""

    value: int


class ActivationVote(Wire, frozen=True):
    """Whether the model is up on all ranks. If not, ranks where it came up take it down."""

    ok: bool


class RankStep(Wire, frozen=True):
    """One continuous-batching step."""


class Shrink(Wire, frozen=True):
    """See `EngineCore.shrink`."""

    size_bytes: int | None


class AskStatus(Wire, frozen=True):
    """Answered by a RankStatus."""


class RankStatus(Wire, frozen=True):
    status: EngineStatus
    # The ledger asked this rank for memory since the last answer.
    asked: bool = False
    # None: all that can go.
    asked_bytes: int | None = None
    # See `EngineCore`.
    handing_over: bool = False


FromLeader = (
    ActivateEngine
    | Deactivate
    | Submit
    | Cancel
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
