"""Log of this frontend's open requests: prompt, attempt, and output so far of each.

Pure bookkeeping without I/O. Chunks carry (request, attempt, first index), which identifies output
of an older attempt, or of a second run of the same attempt. A new attempt resumes after the output
that has arrived, so that none is shown or computed twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from prism import clock
from prism.frontend.http.error_bodies import OverloadedError
from prism.messages.requests import Chunk, Failure, Request, Resume, Started
from prism.scheduler.traffic import bucket

# Limits on attempts whose engine died, possibly because of them; on all attempts; and on resends.
SUSPECTED_MAX = 3
ATTEMPTS_MAX = 20
RESENDS_MAX = 3

Event = tuple[int, Chunk | Failure]  # number of the choice; its new tokens or its failure


class Mailbox(deque[Event]):
    """Event queue of one HTTP request with one consumer. An asyncio.Queue costs several times as
    much per token."""

    _waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, most: int) -> list[Event]:
        """Waits for an event, and returns up to `most` events in order."""
        while not self:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self) == 1:
            return [self.popleft()]
        return [self.popleft() for _ in range(min(most, len(self)))]


class ChunkOutcome(Enum):
    """Action that a chunk or failure requires."""

    NOTHING = auto()
    UNKNOWN = auto()
    RETRY = auto()
    FAIL = auto()


@dataclass(slots=True)
class OpenRequest:
    """Entry of the log: a request until it ends, and the mailbox for its events."""

    request: Request
    choice: int
    mailbox: Mailbox
    received: list[int] = field(default_factory=list)  # output so far
    enqueued: bool = False  # Redis has or had this attempt
    resends: int = 0  # number of resends of attempts lost by the queue
    suspected: int = 0  # number of attempts whose engine died, possibly because of them
    started: Started | None = None  # time and place of its first start in an engine
    # Agents that have begun this attempt. The last one computes it. The others have lost the queue
    # that they took it from, and may not know it yet.
    agents: list[str] = field(default_factory=list)
    progress_s: float = field(default_factory=time.monotonic)  # time it was sent or had output
    ended: bool = False  # the last chunk is in the mailbox; a slow client may not have it yet

    @property
    def awaits_output(self) -> bool:
        """True before this attempt's first output."""
        return len(self.received) == self.request.resumed_tokens

    def start_next_attempt(self) -> None:
        """Prepares another attempt, which resumes after the output that has arrived."""
        request, resume = self.request, self.request.resume
        if self.received:
            request, resume = request.as_resumed(clock.unix_s()), Resume(list(self.received))
        attempt = request.attempt + 1
        self.request = msgspec.structs.replace(request, attempt=attempt, resume=resume)
        self.enqueued, self.progress_s = False, time.monotonic()
        self.agents.clear()

    def note_agent(self, agent: str) -> None:
        """Records that the agent has begun this attempt."""
        self.agents = [*(each for each in self.agents if each != agent), agent]

    def is_superseded(self, agent: str) -> bool:
        """Returns whether another agent has begun this attempt after `agent`."""
        return agent in self.agents[:-1]

    def note_blame(self, failure: Failure) -> None:
        """Records that the attempt is suspected of its engine's death. A suspect is retried
        alone."""
        if failure.blame == "suspect":
            self.suspected += 1
            suspected_at = max(failure.output_tokens, len(self.received))
            self.request = msgspec.structs.replace(self.request, suspected_at=suspected_at)

    def note_resend(self) -> bool:
        """Records a resend of the attempt. Returns False if the limit is exceeded."""
        self.enqueued, self.progress_s = False, time.monotonic()
        self.resends += 1
        return self.resends <= RESENDS_MAX

    def fail(self, code: str, message: str) -> None:
        failure = Failure(self.request.id, self.request.attempt, code, message)
        self.mailbox.put((self.choice, failure))


def share_of(open_max: int, models: int) -> int:
    """Returns the part of `open_max` that is reserved for each model: half of it, divided."""
    return open_max // (2 * max(1, models))


def kept_for_others(
    share: int, models: int, open_by_model: Mapping[str, int], asking: Collection[str]
) -> int:
    """Returns the unused part of the reservations of the models that do not ask."""
    used = [min(n, share) for m, n in open_by_model.items() if m not in asking]
    # Removed models may still have requests.
    return max(0, share * (models - len(asking)) - sum(used))


class RequestLog:
    """Log of at most `open_max` open requests. For one event loop.

    Half of the limit is shared. The other half is reserved in equal parts for each of `models`
    models, so that a flood of one model's requests leaves the others their part.
    """

    def __init__(self, open_max: int, models: int = 1) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._by_model: Counter[str] = Counter()
        # Model -> requests that have arrived, by bucket of their prompt's length.
        self.arrivals: dict[str, dict[int, int]] = {}
        self.resize(open_max, models)

    def resize(self, open_max: int, models: int) -> None:
        """Changes the limits for new requests. Open requests stay."""
        self._open_max = open_max
        self._models = models
        self._share = share_of(open_max, models)

    def models(self) -> set[str]:
        """Returns the models with open requests."""
        return {model for model, count in self._by_model.items() if count}

    @property
    def max_per_model(self) -> int:
        """Number of requests for one model that fit if no others are open."""
        return self._open_max - self._share * (self._models - 1)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def unended(self) -> list[OpenRequest]:
        """Returns the requests whose last chunk has not arrived."""
        return [entry for entry in self._open.values() if not entry.ended]

    def count_arrivals(self, opened: Sequence[OpenRequest]) -> None:
        """Counts requests that arrive, whether or not they are added."""
        for each in opened:
            counts = self.arrivals.setdefault(each.request.model, {})
            number = bucket(len(each.request.prompt_ids))
            counts[number] = counts.get(number, 0) + 1

    def add(self, opened: list[OpenRequest]) -> None:
        """Adds all requests, or none and raises OverloadedError if they do not all fit."""
        asked = Counter(entry.request.model for entry in opened)
        kept = kept_for_others(self._share, self._models, self._by_model, asked)
        if len(self._open) + len(opened) + kept > self._open_max:
            raise OverloadedError(
                f"{len(self._open)} requests are open here and {self._open_max} is the limit"
                f" (frontend.max_open_requests), of which {kept} are reserved for other models;"
                " try again later"
            )
        self._open.update({entry.request.id: entry for entry in opened})
        self._by_model += asked

    def late(self, model: str, now_unix_s: float, slo_ttft_s: float) -> int:
        """Returns the number of requests for the model that have no token and are past their TTFT
        SLO, but at least past the model's `slo_ttft_s`: a tighter SLO of a request does not count
        against others."""
        asked = (e.request for e in self._open.values() if not e.received)
        return sum(
            request.model == model
            and now_unix_s > request.arrival_unix_s + max(slo_ttft_s, request.slo_ttft_s)
            for request in asked
        )

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def close(self, request_id: str) -> OpenRequest | None:
        """Removes and returns the request. Later chunks for it are UNKNOWN."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._by_model[entry.request.model] -= 1
        return entry

    def take_start(self, started: Started, agent: str = "") -> OpenRequest | None:
        """Returns the request if this is its first start in an engine."""
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
        if entry.ended or chunk.attempt != entry.request.attempt or entry.is_superseded(agent):
            return ChunkOutcome.NOTHING
        first, received = chunk.first_index, len(entry.received)
        # Output was lost, or an agent assumed that this frontend is dead, or a replaced agent runs
        # the attempt from its start, and only greedy output is repeatable.
        lost = first > received or chunk.finish_reason == "cancelled"
        lost |= bool(entry.agents) and agent != entry.agents[-1]  # its `Started` was lost too
        if lost or (first < received and entry.request.sampling.temperature > 0):
            return self._retry_or_fail(entry)
        self._deliver(entry, chunk)
        return ChunkOutcome.NOTHING

    def take_failure(self, failure: Failure, agent: str = "") -> ChunkOutcome:
        entry = self._open.get(failure.request_id)
        if entry is None or entry.ended or failure.attempt != entry.request.attempt:
            return ChunkOutcome.NOTHING
        if entry.is_superseded(agent):
            return ChunkOutcome.NOTHING
        entry.note_blame(failure)
        return self._retry_or_fail(entry) if failure.retryable else ChunkOutcome.FAIL

    def _retry_or_fail(self, entry: OpenRequest) -> ChunkOutcome:
        """Returns RETRY or FAIL. A request that loses agents or devices is retried more often than
        one whose engines die while they compute it."""
        again = entry.suspected < SUSPECTED_MAX and entry.request.attempt < ATTEMPTS_MAX
        return ChunkOutcome.RETRY if again else ChunkOutcome.FAIL

    def _deliver(self, entry: OpenRequest, chunk: Chunk) -> None:
        if skipped := len(entry.received) - chunk.first_index:
            chunk = _without(chunk, skipped)
        entry.received += chunk.token_ids
        entry.progress_s = time.monotonic()
        entry.ended = chunk.finish_reason is not None
        if chunk.token_ids or entry.ended:
            entry.mailbox.put((entry.choice, chunk))


def _without(chunk: Chunk, skipped: int) -> Chunk:
    """Returns the chunk without its first `skipped` tokens."""
    return msgspec.structs.replace(
        chunk,
        first_index=chunk.first_index + skipped,
        token_ids=chunk.token_ids[skipped:],
        logprobs=chunk.logprobs.part(skipped) if chunk.logprobs else None,
    )
