"""The open requests of this frontend: the prompt and the attempt of each, and its output so far.

Pure bookkeeping; no I/O. Chunks carry (request, attempt, first index), so that output of an older
attempt, or of a second run of the same attempt, is recognised. Another attempt goes on behind the
output that has arrived, so no output is shown twice and none is computed twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from prism import clock
from prism.frontend.errors import OverloadedError
from prism.messages.requests import Chunk, Failure, Request, Resume, Started

# Attempts whose engine died, perhaps by them; and attempts in all, whoever was to blame.
SUSPECTED_MAX = 3
ATTEMPTS_MAX = 20
RESENDS_MAX = 3

# What happens to a choice, by its number: new tokens, or its failure.
Event = tuple[int, Chunk | Failure]  # of the choice of this number


class Mailbox(deque[Event]):
    """Events of one HTTP request, for one task that takes them: an asyncio.Queue costs several
    times as much, for each token."""

    _news: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self.append(event)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def take(self, most: int) -> list[Event]:
        """What is there, in order, and one at least: up to so many."""
        while not self:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if len(self) == 1:
            return [self.popleft()]
        return [self.popleft() for _ in range(min(most, len(self)))]


class ChunkOutcome(Enum):
    """What to do about a chunk or failure after the log has taken it."""

    NOTHING = auto()
    UNKNOWN = auto()
    RETRY = auto()
    BREAK = auto()


@dataclass(slots=True)
class OpenRequest:
    """An entry of the log: a request until it ends, and where its events go."""

    request: Request
    choice: int
    mailbox: Mailbox
    received: list[int] = field(default_factory=list)  # its output so far
    enqueued: bool = False  # Redis has this attempt, or had it
    resends: int = 0  # of attempts that the queue had lost
    suspected: int = 0  # attempts whose engine died, perhaps by them
    started: Started | None = None  # when and where it came to an engine first
    # Those that have begun this attempt. The last one computes it: the others have lost the queue
    # that they took it from, and may not know it yet.
    agents: list[str] = field(default_factory=list)
    progress_s: float = field(default_factory=time.monotonic)  # when it was sent or output came
    ended: bool = False  # its last chunk is in the mailbox; its client may be slow to take it

    @property
    def waits(self) -> bool:
        """No output of this attempt has come."""
        return len(self.received) == self.request.resumed_tokens

    def go_on(self) -> None:
        """Another attempt, behind the output that has arrived."""
        request, resume = self.request, self.request.resume
        if self.received:
            request, resume = request.going_on(clock.unix_s()), Resume(list(self.received))
        attempt = request.attempt + 1
        self.request = msgspec.structs.replace(request, attempt=attempt, resume=resume)
        self.enqueued, self.progress_s = False, time.monotonic()
        self.agents.clear()

    def note_agent(self, agent: str) -> None:
        """It has begun this attempt."""
        self.agents = [*(each for each in self.agents if each != agent), agent]

    def has_left(self, agent: str) -> bool:
        """Whether another agent has begun this attempt since."""
        return agent in self.agents[:-1]

    def note_blame(self, failure: Failure) -> None:
        """A suspect of its engine's death is tried alone."""
        if failure.blame == "suspect":
            self.suspected += 1
            suspected_at = max(failure.output_tokens, len(self.received))
            self.request = msgspec.structs.replace(self.request, suspected_at=suspected_at)

    def note_resend(self) -> bool:
        """The attempt is to be sent once more. False: that was done too often."""
        self.enqueued, self.progress_s = False, time.monotonic()
        self.resends += 1
        return self.resends <= RESENDS_MAX

    def break_off(self, code: str, message: str) -> None:
        failure = Failure(self.request.id, self.request.attempt, code, message)
        self.mailbox.put((self.choice, failure))


class RequestLog:
    """At most `open_max` requests. For one event loop.

    Half of that is for whoever comes, the other half is kept in equal parts for each of `models`
    models: a flood of one model's requests leaves the others their part.
    """

    def __init__(self, open_max: int, models: int = 1) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._by_model: Counter[str] = Counter()
        self.resize(open_max, models)

    def resize(self, open_max: int, models: int) -> None:
        """For requests from now on: those that are open stay."""
        self._open_max = open_max
        self._models = models
        self._share = open_max // (2 * models)

    def models(self) -> set[str]:
        """Those with open requests."""
        return {model for model, count in self._by_model.items() if count}

    @property
    def most_of_one_model(self) -> int:
        """Requests for it that have room where no other is open."""
        return self._open_max - self._share * (self._models - 1)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def unended(self) -> list[OpenRequest]:
        """Those that owe output."""
        return [entry for entry in self._open.values() if not entry.ended]

    def add(self, opened: list[OpenRequest]) -> None:
        """Raises OverloadedError, adding none, where they do not all have room."""
        asked = Counter(entry.request.model for entry in opened)
        kept = self._kept_for_others(asked)
        if len(self._open) + len(opened) + kept > self._open_max:
            raise OverloadedError(
                f"{len(self._open)} requests are open here and {self._open_max} is the limit"
                f" (frontend.max_open_requests), of which {kept} are kept for other models; try"
                " again later"
            )
        self._open.update({entry.request.id: entry for entry in opened})
        self._by_model += asked

    def _kept_for_others(self, asking: Collection[str]) -> int:
        """What the other models have not used of their part."""
        used = [min(n, self._share) for m, n in self._by_model.items() if m not in asking]
        # Models that were removed may have requests, too.
        return max(0, self._share * (self._models - len(asking)) - sum(used))

    def late(self, model: str, now_unix_s: float, slo_ttft_s: float) -> int:
        """Requests for the model that have no token yet and should have had one. `slo_ttft_s`: the
        model's own. A request that asks for less does not make others wait."""
        asked = (e.request for e in self._open.values() if not e.received)
        return sum(
            request.model == model
            and now_unix_s > request.arrival_unix_s + max(slo_ttft_s, request.slo_ttft_s)
            for request in asked
        )

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def close(self, request_id: str) -> OpenRequest | None:
        """The request is over; later chunks for it are UNKNOWN."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._by_model[entry.request.model] -= 1
        return entry

    def take_start(self, started: Started, agent: str = "") -> OpenRequest | None:
        """The request, where this is the first time that it came to an engine."""
        entry = self._open.get(started.request_id)
        if entry is None:
            return None
        if started.attempt == entry.request.attempt:
            entry.note_agent(agent)
        if entry.started is not None:
            return None
        entry.started = started
        return entry

    def take_chunk(self, chunk: Chunk, agent: str = "") -> ChunkOutcome:
        entry = self._open.get(chunk.request_id)
        if entry is None:
            return ChunkOutcome.UNKNOWN if chunk.finish_reason is None else ChunkOutcome.NOTHING
        if entry.ended or chunk.attempt != entry.request.attempt or entry.has_left(agent):
            return ChunkOutcome.NOTHING
        first, received = chunk.first_index, len(entry.received)
        # Output was lost; or an agent took this frontend for dead; or a replaced agent runs the
        # attempt from its start, and only greedy output repeats itself.
        lost = first > received or chunk.finish_reason == "cancelled"
        lost |= bool(entry.agents) and agent != entry.agents[-1]  # and so was word of its start
        if lost or (first < received and entry.request.sampling.temperature > 0):
            return self._again_or_break(entry)
        self._deliver(entry, chunk)
        return ChunkOutcome.NOTHING

    def take_failure(self, failure: Failure, agent: str = "") -> ChunkOutcome:
        entry = self._open.get(failure.request_id)
        if entry is None or entry.ended or failure.attempt != entry.request.attempt:
            return ChunkOutcome.NOTHING
        if entry.has_left(agent):
            return ChunkOutcome.NOTHING
        entry.note_blame(failure)
        return self._again_or_break(entry) if failure.retryable else ChunkOutcome.BREAK

    def _again_or_break(self, entry: OpenRequest) -> ChunkOutcome:
        """One whose agents or devices are taken away is tried more often than one whose engines
        die while they compute it."""
        again = entry.suspected < SUSPECTED_MAX and entry.request.attempt < ATTEMPTS_MAX
        return ChunkOutcome.RETRY if again else ChunkOutcome.BREAK

    def _deliver(self, entry: OpenRequest, chunk: Chunk) -> None:
        if skipped := len(entry.received) - chunk.first_index:
            chunk = _without(chunk, skipped)
        entry.received += chunk.token_ids
        entry.progress_s = time.monotonic()
        entry.ended = chunk.finish_reason is not None
        if chunk.token_ids or entry.ended:
            entry.mailbox.put((entry.choice, chunk))


def _without(chunk: Chunk, skipped: int) -> Chunk:
    """Its first tokens are known."""
    return msgspec.structs.replace(
        chunk,
        first_index=chunk.first_index + skipped,
        token_ids=chunk.token_ids[skipped:],
        logprobs=chunk.logprobs.part(skipped) if chunk.logprobs else None,
    )
