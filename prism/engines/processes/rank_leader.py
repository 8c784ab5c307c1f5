"""Rank 0 of a tensor-parallel engine, the core that the worker steps (Prism §5.2)."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Sequence

import msgspec

import kvcached
from prism.config.checks.memory_needs import shard_of
from prism.engines.core import EngineCore, ShrinkCall, StepOutput, activation_failed
from prism.engines.ranks.group import RankGroup
from prism.engines.ranks.orders import ActivationVote, AskStatus, RankStatus, RankStep, Shrink
from prism.errors import ActivationError, RankLostError, SelfCheckError
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
from prism.messages.gpu_memory import OutsideMemory
from prism.messages.requests import Cancel, Request, Resume


class LeaderCore:
    """Core of rank 0, which forwards every call to the other ranks first.

    The ranks stay in step because they see the same calls and agree on everything that depends on
    a device: each allocation (`kvcached.RankKV`) and each activation. Status reports the figures of
    one rank; its token counts are the minimum over all ranks.
    """

    def __init__(self, core: EngineCore, group: RankGroup, pids: Sequence[int]) -> None:
        self._core = core
        self._group = group
        self._pids = list(pids)
        self._shrink_requests: list[int | None] = []

    def activate(self, order: ActivateEngine) -> Activated:
        """Activates the model on all ranks at once. Raises ActivationError if any rank fails; the
        model is then active on none."""
        model = shard_of(order.model, self._group.size)
        order = msgspec.structs.replace(order, model=model)
        self._group.broadcast(order)
        own = try_activate(self._core, order)
        everyone = [own, *self._group.gather((Activated, ActivationFailed))]
        failures = [(r, f) for r, f in enumerate(everyone) if isinstance(f, ActivationFailed)]
        self._group.broadcast(ActivationVote(not failures))
        if isinstance(own, Activated) and not failures:
            return msgspec.structs.replace(own, link_bytes=_total(everyone))
        if isinstance(own, Activated):
            self._core.deactivate()
        raise _error(failures)

    def deactivate(self) -> None:
        self._shrink_requests.clear()
        self._group.broadcast(Deactivate())
        self._core.deactivate()

    def submit(self, requests: Sequence[Request]) -> None:
        seeded = [_seeded(request) for request in requests]
        self._group.broadcast(Submit(seeded))
        self._core.submit(seeded)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._group.broadcast(Cancel(list(request_ids)))
        self._core.cancel(request_ids)

    def pause(self, request_ids: Sequence[str]) -> None:
        self._group.broadcast(PauseRequests(list(request_ids)))
        self._core.pause(request_ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        self._group.broadcast(ResumeRequests(list(request_ids)))
        self._core.resume(request_ids)

    def export(self, targets: Sequence[str] | None = ()) -> list[Request]:
        """Exports the requests, with KV if each rank offers its part. All ranks have the same
        requests in the same order."""
        self._group.broadcast(Export(None if targets is None else tuple(targets)))
        own = self._core.export(targets)
        others = [exported.requests for exported in self._group.gather(Exported)]
        return [_merge_ranks(parts) for parts in zip(own, *others, strict=True)]

    def handing_over(self) -> bool:
        return self._core.handing_over() or any(o.handing_over for o in self._ask_others())

    def step(self) -> StepOutput:
        self._group.broadcast(RankStep())
        return self._core.step()

    # --- memory ----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._core.fileno()

    def shrink(self, size_bytes: int | None = None) -> kvcached.Shrunk:
        """Evicts the same part of the prefix cache on every rank."""
        self._group.broadcast(Shrink(size_bytes))
        return self._core.shrink(size_bytes)

    def answer_requests(self, shrink: ShrinkCall | None = None) -> bool:
        """Answers also the requests of other ranks' ledgers that came with their last status."""
        answered = self._core.answer_requests(shrink or self.shrink)
        while self._shrink_requests:
            self.shrink(self._shrink_requests.pop())
            answered = True
        return answered

    def set_limit(self, kv_limit_bytes: int | None) -> None:
        self._group.broadcast(SetLimit(kv_limit_bytes))
        self._core.set_limit(kv_limit_bytes)

    # --- status and end --------------------------------------------------------------------

    def status(self) -> EngineStatus:
        own = self._core.status()
        others = self._ask_others()
        everyone = [own, *(other.status for other in others)]
        return msgspec.structs.replace(
            own,
            available_tokens=min(s.available_tokens for s in everyone),
            free_mapped_tokens=min(s.free_mapped_tokens for s in everyone),
            evictable_tokens=min(s.evictable_tokens for s in everyone),
            outside=_worst(own.outside, [s.outside for s in everyone if s.outside is not None]),
        )

    def _ask_others(self) -> list[RankStatus]:
        self._group.broadcast(AskStatus())
        others = self._group.gather(RankStatus)
        self._shrink_requests += [other.asked_bytes for other in others if other.asked]
        return others

    def close(self) -> None:
        """Shuts all ranks down, also if some are gone already."""
        try:
            self._group.broadcast(Shutdown())
        except RankLostError:
            self._group.close()
        self._core.close()
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._pids.clear()


def try_activate(core: EngineCore, order: ActivateEngine) -> Activated | ActivationFailed:
    try:
        return core.activate(order)
    except ActivationError as error:
        return activation_failed(order.model.name, error)


def _total(everyone: Sequence[Wire]) -> dict[str, int]:
    """Returns the bytes that all ranks loaded over each link."""
    total: Counter[str] = Counter()
    for rank in everyone:
        total.update(rank.link_bytes if isinstance(rank, Activated) else {})
    return dict(total)


def _worst(own: OutsideMemory | None, everyone: Sequence[OutsideMemory]) -> OutsideMemory | None:
    """Returns the figures of the rank that holds most beyond its lease, with the pid of this
    process. None on host devices."""
    if own is None:
        return None
    worst = max(everyone, key=lambda rank: rank.excess_bytes)
    return msgspec.structs.replace(worst, driver_pid=own.driver_pid)


def _error(failures: Sequence[tuple[int, ActivationFailed]]) -> ActivationError:
    """Returns the error of the rank that lacks the most memory, or of all ranks if none lacks any:
    some may report only that another one has failed."""
    worst = max((failure for _, failure in failures), key=lambda failure: failure.missing_bytes)
    kind = SelfCheckError if worst.needs_fresh_engine else ActivationError
    told = [(r, f) for r, f in failures if f is worst or not worst.missing_bytes]
    return kind("; ".join(f"rank {r}: {f.message}" for r, f in told), worst.missing_bytes)


def _seeded(request: Request) -> Request:
    """Returns the request with a seed, since all ranks must draw the same tokens."""
    if request.sampling.seed is not None:
        return request
    sampling = msgspec.structs.replace(request.sampling, seed=secrets.randbits(62))
    return msgspec.structs.replace(request, sampling=sampling)


def _merge_ranks(parts: Sequence[Request]) -> Request:
    """Returns a request that each rank has exported, with its KV if every rank offers its part."""
    resume = parts[0].resume
    if resume is None:
        return parts[0]
    offers = tuple(o for part in parts if part.resume for o in part.resume.kv_offers)
    kv_tokens = resume.kv_tokens if len(offers) == len(parts) else 0
    joined = Resume(resume.output_ids, "", kv_tokens, offers if kv_tokens else ())
    return msgspec.structs.replace(parts[0], resume=joined)
