"""The open requests of this frontend: for each the prompt, the attempt, and what has arrived.

Pure bookkeeping; no I/O. Chunks carry (request, attempt, first index), so what an older attempt
or a second run of the same attempt sends is recognised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from prism.frontend.errors import OverloadedError
from prism.messages import Chunk, Failure, Request

ATTEMPTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output of one choice."""

    choice: int
    attempt: int
    token_ids: list[int]
    finish_reason: str | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The choice begins anew: forget its output (none of it was seen by the client)."""

    choice: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The choice cannot be finished."""

    choice: int
    code: str
    message: str


Event = Tokens | Restarted | Broken
Mailbox = asyncio.Queue[Event]


class Verdict(Enum):
    """What to do about a chunk or failure after the log has taken it."""

    NOTHING = auto()
    UNKNOWN = auto()
    RETRY = auto()
    BREAK = auto()


@dataclass(slots=True)
class OpenRequest:
    """`visible`: the client has seen output of this choice, so it cannot begin anew."""

    request: Request
    choice: int
    mailbox: Mailbox
    received_tokens: int = 0
    visible: bool = False

    @property
    def greedy(self) -> bool:
        return self.request.sampling.temperature == 0

    def restart(self, attempt: int) -> None:
        self.request = msgspec.structs.replace(self.request, attempt=attempt)
        self.received_tokens = 0
        self.mailbox.put_nowait(Restarted(self.choice, attempt))

    def break_off(self, code: str, message: str) -> None:
        self.mailbox.put_nowait(Broken(self.choice, code, message))


class RequestLog:
    """At most `open_max` requests. For one event loop."""

    def __init__(self, open_max: int) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._open_max = open_max

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def add(self, opened: list[OpenRequest]) -> None:
        """Raises OverloadedError, adding none, where they do not all have room."""
        if len(self._open) + len(opened) > self._open_max:
            raise OverloadedError(
                f"{len(self._open)} requests are open here and {self._open_max} is the limit"
                " (frontend.max_open_requests); try again later"
            )
        self._open.update({entry.request.id: entry for entry in opened})

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def close(self, request_id: str) -> OpenRequest | None:
        """The request is over; later chunks for it are UNKNOWN."""
        return self._open.pop(request_id, None)

    def take_chunk(self, chunk: Chunk) -> Verdict:
        entry = self._open.get(chunk.request_id)
        if entry is None:
            return Verdict.UNKNOWN if chunk.finish_reason is None else Verdict.NOTHING
        if chunk.attempt != entry.request.attempt:
            return Verdict.NOTHING
        if chunk.first_index > entry.received_tokens or chunk.finish_reason == "cancelled":
            # Output was lost, or an agent took this frontend for dead.
            return self._again_or_break(entry)
        if chunk.first_index < entry.received_tokens and not self._rerun(entry):
            return Verdict.BREAK
        self._deliver(entry, chunk)
        return Verdict.NOTHING

    def take_failure(self, failure: Failure) -> Verdict:
        entry = self._open.get(failure.request_id)
        if entry is None or failure.attempt != entry.request.attempt:
            return Verdict.NOTHING
        return self._again_or_break(entry) if failure.retryable else Verdict.BREAK

    def _again_or_break(self, entry: OpenRequest) -> Verdict:
        again = not entry.visible and entry.request.attempt < ATTEMPTS_MAX
        return Verdict.RETRY if again else Verdict.BREAK

    def _rerun(self, entry: OpenRequest) -> bool:
        """Another engine serves the same attempt from its start (its agent was replaced). Greedy
        output repeats itself and is skipped over; sampled output begins anew if unseen."""
        if entry.greedy:
            return True
        if entry.visible:
            return False
        entry.restart(entry.request.attempt)
        return True

    def _deliver(self, entry: OpenRequest, chunk: Chunk) -> None:
        fresh = chunk.token_ids[entry.received_tokens - chunk.first_index :]
        entry.received_tokens += len(fresh)
        if fresh or chunk.finish_reason is not None:
            event = Tokens(
                entry.choice, chunk.attempt, fresh, chunk.finish_reason, chunk.cached_tokens
            )
            entry.mailbox.put_nowait(event)
