"""The ranks above 0: they do what rank 0 does, when it does it."""

from __future__ import annotations

import select

import kvcached
from prism.engines.core import EngineCore
from prism.engines.ranks.group import RankGroup
from prism.engines.ranks.leader import outcome
from prism.engines.ranks.orders import (
    ActivationVote,
    AskStatus,
    FromLeader,
    RankStatus,
    RankStep,
    Shrink,
)
from prism.errors import RankLostError
from prism.messages.engine import (
    Activated,
    ActivateEngine,
    Deactivate,
    Export,
    Exported,
    SetLimit,
    Shutdown,
    Submit,
)
from prism.messages.requests import Cancel


class Follower:
    """Replays rank 0's calls on this rank's core. What a step puts out is rank 0's to send."""

    def __init__(self, core: EngineCore, group: RankGroup) -> None:
        self._core = core
        self._group = group
        self._asked: list[int | None] = []

    def run(self) -> None:
        """Until rank 0 shuts down. Raises RankLostError when it is gone, and what the core raises:
        the process must end then, and rank 0 will find it gone."""
        descriptors = [self._group.fileno(), self._core.fileno()]
        while True:
            select.select(descriptors, [], [])
            self._core.answer_requests(self._note)
            if select.select(descriptors[:1], [], [], 0)[0]:
                order = self._group.order()
                if isinstance(order, Shutdown):
                    return
                self._obey(order)

    def _note(self, size_bytes: int | None) -> kvcached.Shrunk:
        """Gives nothing back yet, since the caches of all ranks must stay alike. Rank 0 learns of
        it with the next status, and all ranks give the same."""
        self._asked.append(size_bytes)
        return kvcached.Shrunk()

    def _obey(self, order: FromLeader) -> None:
        match order:
            case RankStep():
                self._core.step()
            case Submit(requests=requests):
                self._core.submit(requests)
            case Cancel(request_ids=ids):
                self._core.cancel(ids)
            case Export(targets=targets):
                self._group.answer(Exported(self._core.export(targets)))
            case Shrink(size_bytes=size_bytes):
                self._core.shrink(size_bytes)
            case SetLimit(kv_limit_bytes=limit_bytes):
                self._core.set_limit(limit_bytes)
            case AskStatus():
                self._tell_status()
            case ActivateEngine():
                self._activate(order)
            case Deactivate():
                self._asked.clear()
                self._core.deactivate()
            case _:
                raise RankLostError(f"rank 0 is out of step: it sent {type(order).__name__}")

    def _activate(self, order: ActivateEngine) -> None:
        own = outcome(self._core, order)
        self._group.answer(own)
        vote = self._group.order()
        if not isinstance(vote, ActivationVote):
            raise RankLostError(f"rank 0 is out of step: it sent {type(vote).__name__}")
        if isinstance(own, Activated) and not vote.ok:
            self._core.deactivate()

    def _tell_status(self) -> None:
        asked_bytes = None if None in self._asked else sum(s for s in self._asked if s)
        handing_over = self._core.handing_over()
        status = RankStatus(self._core.status(), bool(self._asked), asked_bytes, handing_over)
        self._asked.clear()
        self._group.answer(status)
