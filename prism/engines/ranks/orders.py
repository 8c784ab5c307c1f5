"""What the ranks of one engine say to each other, in the terms of the worker's own messages."""

from __future__ import annotations

from prism.messages import (
    Activate,
    Activated,
    ActivationFailed,
    Cancel,
    Deactivate,
    EngineStatus,
    Export,
    Exported,
    SetLimit,
    Shutdown,
    Submit,
    Wire,
)


class Vote(Wire, frozen=True):
    """One rank's value, or to the others the smallest of all."""

    value: int


class Verdict(Wire, frozen=True):
    """Whether the model is up on all ranks. If not, those where it came up take it down."""

    ok: bool


class Step(Wire, frozen=True):
    """One continuous-batching step."""


class Shrink(Wire, frozen=True):
    """See `EngineCore.shrink`."""

    size_bytes: int | None


class AskStatus(Wire, frozen=True):
    """Answered by a RankStatus."""


class RankStatus(Wire, frozen=True):
    """`asked`: the ledger asked this rank for memory since the last answer, for `asked_bytes`
    (None: for all that can go). `handing_over`: see `EngineCore`."""

    status: EngineStatus
    asked: bool = False
    asked_bytes: int | None = None
    handing_over: bool = False


FromLeader = (
    Activate
    | Deactivate
    | Submit
    | Cancel
    | Export
    | SetLimit
    | Shutdown
    | Vote
    | Verdict
    | Step
    | Shrink
    | AskStatus
)
FromFollower = Vote | Exported | Activated | ActivationFailed | RankStatus
