"""Requests that wait in the unplaced queue, and counts of those on devices, as read from Redis.

For policies that bind requests to devices (`Policy.binds_requests`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prism import clock
from prism.messages.requests import Request
from prism.policies.queues import QueuedRequest
from prism.queueing.request_queue import RequestQueue

FIRST = "0"  # cursor before all entries
AT_ONCE = 256
"""Number of requests in one call. Redis does nothing else meanwhile."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request_id: str
    # Its id is that of the entry, since a request that returns to the queue has a new place.
    shown: QueuedRequest


class WaitingRequests:
    """Mirror of the unplaced queue, without prompts. For use from one event loop.

    Args:
        output_tokens: Returns a model's expected output tokens.
    """

    def __init__(self, output_tokens: Callable[[str], float]) -> None:
        self._output_tokens = output_tokens
        self._known: dict[str, _Waiting] = {}  # by entry, oldest first
        self._is_stale = False  # True if some have left the queue
        self.cursor = FIRST
        # Entries that are not requests.
        self.malformed: list[str] = []
        # Device -> number of requests that wait or run there.
        self.open: dict[str, int] = {}

    async def read(self, queue: RequestQueue, devices: Sequence[str], now_s: float) -> None:
        """Reads new entries and the counts of `devices`. Raises QueueUnavailableError.

        Args:
            now_s: Present time on the clock of the requests' times.
        """
        is_last = False
        while not is_last:
            part = await queue.read_unplaced(self.cursor, devices)
            self.cursor, is_last = part.cursor, part.is_last
            since_s = now_s - clock.unix_s()
            for entry, request in part.requests:
                self._known[entry] = self._waiting(entry, request, since_s)
            self.malformed += part.malformed
        self.open = part.open
        missing = part.size - len(self._known) - len(self.malformed)
        self._is_stale |= missing < 0
        if missing > 0:
            # Redis lost its data, or its clock was set back: unread entries have smaller ids.
            self.cursor, self._known, self.malformed = FIRST, {}, []

    def _waiting(self, entry: str, request: Request, since_s: float) -> _Waiting:
        shown = QueuedRequest(
            entry,
            request.model,
            request.arrival_unix_s + since_s,
            request.deadline_unix_s + since_s,
            request.known_tokens,
            self._output_tokens(request.model),
            is_resumed=request.resumed_tokens > 0,
        )
        return _Waiting(request.id, shown)

    async def prune(self, queue: RequestQueue) -> None:
        """Drops requests that have left the queue: cancelled ones, for instance."""
        if not self._is_stale:
            return
        kept: set[str] = set()
        for entries in _batches(self._known):
            kept |= await queue.still_unplaced({e: self._known[e].request_id for e in entries})
        self._known = {entry: w for entry, w in self._known.items() if entry in kept}
        self.malformed = []
        self._is_stale = False

    def counts(self) -> dict[str, int]:
        """Returns model -> number of requests that wait in the queue."""
        return dict(Counter(waiting.shown.model for waiting in self._known.values()))

    def of(self, models: Collection[str]) -> tuple[QueuedRequest, ...]:
        """Returns the waiting requests of these models, oldest entry first."""
        return tuple(w.shown for w in self._known.values() if w.shown.model in models)

    def has(self, entry: str) -> bool:
        """Returns whether this entry is known to wait."""
        return entry in self._known

    async def bind(self, queue: RequestQueue, device: str, entries: Iterable[str]) -> None:
        """Moves those of the entries that are known to the device."""
        for some in _batches(e for e in entries if e in self._known):
            moved = await queue.bind(device, some)
            self.open[device] = self.open.get(device, 0) + len(moved)
            self._is_stale |= len(moved) < len(some)
            for entry in moved:
                del self._known[entry]

    async def bind_malformed(self, queue: RequestQueue, device: str) -> None:
        """Moves entries that are not requests to a device, whose agent sets them aside."""
        if self.malformed:
            await queue.bind(device, self.malformed, anywhere=True)
            self.malformed = []


def _batches(entries: Iterable[str]) -> Iterator[list[str]]:
    all_ = list(entries)
    for start in range(0, len(all_), AT_ONCE):
        yield all_[start : start + AT_ONCE]
