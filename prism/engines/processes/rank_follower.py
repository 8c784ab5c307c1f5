"""Ranks above 0, which repeat the calls of rank 0."""

from __future__ import annotations

import select

import kvcached
from prism.engines.core import EngineCore
from prism.engines.processes.rank_leader import try_activate
from prism.engines.ranks.group import RankGroup
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
    PauseRequests,
    ResumeRequests,
    SetLimit,
    Shutdown,
    Submit,
)
from prism.messages.requests import Cancel


class Follower:
    """Repeats rank 0's calls on this rank's core. Only rank 0 sends the output of a step."""

    def __init__(self, core: EngineCore, group: RankGroup) -> None:
        self._core = core
        self._group = group
        self._shrink_requests: list[int | None] = []

    def run(self) -> None:
        """Runs until rank 0 shuts down.

        Raises RankLostError when rank 0 is gone, and the core's errors. The process must then end;
        rank 0 detects its end.
        """
        descriptors = [self._group.fileno(), self._core.fileno()]
        while True:
            select.select(descriptors, [], [])
            self._core.answer_requests(self._record_shrink)
            if select.select(descriptors[:1], [], [], 0)[0]:
                order = self._group.order()
                if isinstance(order, Shutdown):
                    return
                self._handle(order)

    def _record_shrink(self, size_bytes: int | None) -> kvcached.Shrunk:
        """Records the ledger's request without freeing memory, since the caches of all ranks must
        stay equal. The next status reports it to rank 0, which shrinks all ranks alike."""
        self._shrink_requests.append(size_bytes)
        return kvcached.Shrunk()

    def _handle(self, order: FromLeader) -> None:
        match order:
            case RankStep():
                self._core.step()
            case Submit(requests=requests):
                self._core.submit(requests)
            case Cancel(request_ids=ids):
                self._core.cancel(ids)
            case PauseRequests(request_ids=ids):
                self._core.pause(ids)
            case ResumeRequests(request_ids=ids):
                self._core.resume(ids)
            case Export(targets=targets):
                self._group.answer(Exported(self._core.export(targets)))
            case Shrink(size_bytes=size_bytes):
                self._core.shrink(size_bytes)
            case SetLimit(kv_limit_bytes=limit_bytes):
                self._core.set_limit(limit_bytes)
            case AskStatus():
                self._send_status()
            case ActivateEngine():
                self._activate(order)
            case Deactivate():
                self._shrink_requests.clear()
                self._core.deactivate()
            case _:
                raise RankLostError(f"rank 0 is out of step: it sent {type(order).__name__}")

    def _activate(self, order: ActivateEngine) -> None:
        own = try_activate(self._core, order)
        self._group.answer(own)
        vote = self._group.order()
        if not isinstance(vote, ActivationVote):
            raise RankLostError(f"rank 0 is out of step: it sent {type(vote).__name__}")
        if isinstance(own, Activated) and not vote.ok:
            self._core.deactivate()

    def _send_status(self) -> None:
        sizes = self._shrink_requests
        asked_bytes = None if None in sizes else sum(size for size in sizes if size)
        handing_over = self._core.handing_over()
        status = RankStatus(self._core.status(), bool(sizes), asked_bytes, handing_over)
        sizes.clear()
        self._group.answer(status)
