"""Shrink requests to other clients, and waiting for the memory that they return."""

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
    """Returns all clients of a coherent read."""
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
    """Returns the policy's demands for what requests under way do not cover yet."""
    missing_bytes -= sum(h.on_the_way_bytes for h in holders if h.answers)
    return policy(missing_bytes, holders) if missing_bytes > 0 else ()


def post(
    ledger: _core.Ledger, view: _core.BalloonView, demands: Sequence[Demand], until_ns: int
) -> list[int | None] | None:
    """Posts one shrink request per demand.

    Returns the requests' numbers, None for each client that is gone. Returns None if the view is
    out of date and nothing was posted.
    """
    asks = [(*d.holder.key, NO_LIMIT if d.size_bytes is None else d.size_bytes) for d in demands]
    return _core.ask(ledger, asks, view.asks, until_ns) if asks else []


def ask_for(
    ledger: _core.Ledger,
    missing: Callable[[_core.BalloonView], int],
    others: Callable[[Holder], bool],
    policy: ShrinkPolicy,
    until_ns: int,
) -> None:
    """Posts shrink requests to `others` for the bytes that `missing` computes from a coherent read.

    Concurrent planners never request the same bytes twice: the second one must read again.
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
    """Client that waits for memory, and the policy that chooses which clients it asks."""

    core: _core.Client
    policy: ShrinkPolicy


@dataclass(frozen=True)
class MemoryRequest:
    """Memory that a client waits for."""

    requester: Requester
    missing_bytes: Callable[[], int | None]
    """Bytes still to reserve; None if they can never be had."""
    is_static: bool = False
    """True for memory to which the client's limit and minimum do not apply."""


def wait_for(request: MemoryRequest, take: Callable[[], T | None], wait_s: float) -> T | None:
    """Calls `take` until it returns a value, and returns that value, or None after `wait_s`.

    Other clients are asked to shrink meanwhile. The GIL is released during sleeps.
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
                _ask_others(request, until_ns)
                _core.sleep(_core.ledger_of(client), seen, until_ns)
            elif had_room:  # the room seen in the last round could not be taken
                time.sleep(_RETRY_S)
            had_room = seen is None
        return taken
    finally:
        _core.end_wait(client)


def _ask_others(request: MemoryRequest, until_ns: int) -> None:
    """Asks other clients for the missing bytes, with half of the remaining time as their deadline.

    The other half is left for asking different clients if those do not answer.
    """
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
    """Returns the bytes wanted by this client and by earlier waiters, less what is free."""
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
    """Posted shrink requests and their answers. `poll` never blocks."""

    def __init__(self, ledger: _core.Ledger, parts: Sequence[_Part], until_ns: int) -> None:
        self._ledger = ledger
        self._parts = parts
        self._until_ns = until_ns

    def poll(self) -> tuple[ShrinkAnswer, ...] | None:
        """Returns the answers in the order of the clients, or None while some may still arrive."""
        return self._answers(_core.balloon_view(self._ledger))

    def wait(self) -> tuple[ShrinkAnswer, ...]:
        """Blocks until every client has answered, ended or missed its deadline. Returns the
        answers.
        """
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
    """Asks each client that `wanted` selects for `size_bytes` (None: all it can give up)."""
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
    elif 0 < (part.number - now.answered) % 2**32 < 2**31:  # newer than the last answered request
        outcome = "no answer"
    return ShrinkAnswer(
        name=part.holder.name,
        pid=part.holder.pid,
        asked_bytes=part.size_bytes,
        returned_bytes=record.given_bytes - part.before.given_bytes,
        evicted_tokens=record.evicted_tokens - part.before.evicted_tokens,
        outcome=outcome,
    )
