"""Posting requests to shrink and waiting for what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import kvcached._core as _core
from kvcached.balloon import Demand, Holder, ShrinkAnswer, ShrinkPolicy

T = TypeVar("T")

NO_LIMIT = 2**64 - 1
_ATTEMPTS = 8
_RETRY_S = 0.005


def holders_of(view: _core.BalloonView) -> list[Holder]:
    """All clients of a coherent read."""
    pairs = zip(view.slots, view.clients, strict=True)
    return [_holder(slot, record, view.now_ns) for slot, record in pairs]


def _holder(slot: int, record: _core.ClientRecord, now_ns: int) -> Holder:
    is_open = record.asked != record.answered
    overdue = is_open and 0 < record.asked_until_ns <= now_ns
    return Holder(
        key=(slot, record.joined),
        name=record.name,
        pid=record.pid,
        held_bytes=record.reserved_bytes,
        min_bytes=record.min_bytes,
        spare_bytes=record.spare_bytes,
        evictable_bytes=record.evictable_bytes,
        asked_bytes=record.asked_bytes if is_open and not overdue else 0,
        idle_s=max(0, now_ns - record.active_ns) / 1e9,
        waits=record.wanted_since > 0 and now_ns < record.wanted_until_ns,
        answers=not overdue and now_ns >= record.ask_not_before_ns,
    )


def plan(missing_bytes: int, holders: Sequence[Holder], policy: ShrinkPolicy) -> Sequence[Demand]:
    """The policy's demands beyond what is on the way already."""
    missing_bytes -= sum(h.on_the_way_bytes for h in holders if h.answers)
    return policy(missing_bytes, holders) if missing_bytes > 0 else ()


def post(
    ledger: _core.Ledger, view: _core.BalloonView, demands: Sequence[Demand], until_ns: int
) -> list[int | None] | None:
    """The requests' numbers, None for clients that are gone; None if the view is out of date."""
    asks = [(*d.holder.key, NO_LIMIT if d.size_bytes is None else d.size_bytes) for d in demands]
    return _core.ask(ledger, asks, view.asks, until_ns) if asks else []


def ask_for(
    ledger: _core.Ledger,
    missing: Callable[[_core.BalloonView], int],
    others: Callable[[Holder], bool],
    policy: ShrinkPolicy,
    until_ns: int,
) -> None:
    """Has the policy distribute over `others` what is missing by a coherent read.

    Two that plan at once never ask for the same bytes twice: the second has to read again.
    """
    for _ in range(_ATTEMPTS):
        view = _core.balloon_view(ledger)
        holders = [holder for holder in holders_of(view) if others(holder)]
        demands = plan(missing(view), holders, policy)
        if post(ledger, view, demands, until_ns) is not None:
            return


# --- a client that waits ---------------------------------------------------------------------


@dataclass(frozen=True)
class Requester:
    """A client that waits for memory, and the policy by which it asks others."""

    core: _core.Client
    policy: ShrinkPolicy


@dataclass(frozen=True)
class MemoryRequest:
    """What a client waits for."""

    requester: Requester
    missing_bytes: Callable[[], int | None]
    """Bytes still to reserve; None if they can never be had."""
    is_static: bool = False
    """Beyond the client's limit and minimum."""


def wait_for(request: MemoryRequest, take: Callable[[], T | None], wait_s: float) -> T | None:
    """What `take` gives as soon as it gives something, None when `wait_s` are over.

    Others are asked to shrink meanwhile. The GIL is released while this sleeps.
    """
    client = request.requester.core
    until_ns = time.monotonic_ns() + int(wait_s * 1e9)
    had_room = False
    try:
        while (taken := take()) is None:
            size_bytes = request.missing_bytes()
            if size_bytes is None or time.monotonic_ns() >= until_ns:
                return None
            seen = _core.want(client, size_bytes, request.is_static, until_ns)
            if seen is not None:
                _ask_for_the_rest(request, until_ns)
                _core.sleep(_core.ledger_of(client), seen, until_ns)
            elif had_room:  # and could not be taken all the same
                time.sleep(_RETRY_S)
            had_room = seen is None
        return taken
    finally:
        _core.end_wait(client)


def _ask_for_the_rest(request: MemoryRequest, until_ns: int) -> None:
    """They have half of the time that is left; the rest is for clients that are asked instead."""
    client = request.requester.core
    slot = _core.slot_of(client)
    now_ns = time.monotonic_ns()
    ask_for(
        _core.ledger_of(client),
        missing=lambda view: _missing_bytes(view, slot),
        others=lambda holder: holder.key[0] != slot,
        policy=request.requester.policy,
        until_ns=now_ns + (until_ns - now_ns) // 2,
    )


def _missing_bytes(view: _core.BalloonView, slot: int) -> int:
    """What this client and those that wait for longer want beyond what is free."""
    clients = view.clients
    me = clients[view.slots.index(slot)]
    if me.wanted_bytes == 0:
        return 0
    ahead = [c for c in clients if 0 < c.wanted_since <= me.wanted_since]
    wanted = sum(c.wanted_bytes for c in ahead if view.now_ns < c.wanted_until_ns)
    return wanted - view.free_bytes


# --- orders from outside ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    holder: Holder
    size_bytes: int | None
    number: int | None
    before: _core.ClientRecord


class ShrinkOrder:
    """Posted requests and their answers. `poll` never blocks."""

    def __init__(self, ledger: _core.Ledger, parts: Sequence[_Part], until_ns: int) -> None:
        self._ledger = ledger
        self._parts = parts
        self._until_ns = until_ns

    def poll(self) -> tuple[ShrinkAnswer, ...] | None:
        """The answers, in order of the clients; None while some may still come."""
        return self._answers(_core.balloon_view(self._ledger))

    def wait(self) -> tuple[ShrinkAnswer, ...]:
        """Until all have answered, ended or let their time pass."""
        while True:
            view = _core.balloon_view(self._ledger)
            if (answers := self._answers(view)) is not None:
                return answers
            _core.sleep(self._ledger, view.seen, self._until_ns)

    def _answers(self, view: _core.BalloonView) -> tuple[ShrinkAnswer, ...] | None:
        now = {(slot, c.joined): c for slot, c in zip(view.slots, view.clients, strict=True)}
        answers = [_answer(part, now.get(part.holder.key)) for part in self._parts]
        if view.now_ns < self._until_ns and any(a.outcome == "no answer" for a in answers):
            return None
        return tuple(answers)


def order_shrink(
    ledger: _core.Ledger,
    wanted: Callable[[Sequence[Holder]], Sequence[Holder]],
    size_bytes: int | None,
    until_ns: int,
) -> ShrinkOrder:
    """Asks each of these clients for `size_bytes`, None: for all that it can do without."""
    while True:
        view = _core.balloon_view(ledger)
        records = {(s, c.joined): c for s, c in zip(view.slots, view.clients, strict=True)}
        demands = [Demand(holder, size_bytes) for holder in wanted(holders_of(view))]
        numbers = post(ledger, view, demands, until_ns)
        if numbers is not None:
            break
    parts = [
        _Part(demand.holder, size_bytes, number, records[demand.holder.key])
        for demand, number in zip(demands, numbers, strict=True)
    ]
    return ShrinkOrder(ledger, parts, until_ns)


def _answer(part: _Part, now: _core.ClientRecord | None) -> ShrinkAnswer:
    outcome, record = "answered", now or part.before
    if now is None or part.number is None:
        outcome = "gone"
    elif 0 < (part.number - now.answered) % 2**32 < 2**31:  # later than the last that was answered
        outcome = "no answer"
    return ShrinkAnswer(
        name=part.holder.name,
        pid=part.holder.pid,
        asked_bytes=part.size_bytes,
        returned_bytes=record.given_bytes - part.before.given_bytes,
        evicted_tokens=record.evicted_tokens - part.before.evicted_tokens,
        outcome=outcome,
    )
