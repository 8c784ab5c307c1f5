"""The agent's copy of what waits in its queue. Redis stores; the order is made here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prism.messages import Request
from prism.scheduler.local import LocalScheduler, Waiting


@dataclass(frozen=True, slots=True)
class Entry:
    """A waiting request and its id in the stream."""

    entry_id: str
    request: Request


class Mirror:
    """Feeds the local scheduler. Deadlines are wall-clock on the wire, monotonic in here.

    `wall_ahead_s`: wall clock minus monotonic clock, now.
    """

    def __init__(self, scheduler: LocalScheduler, wall_ahead_s: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._wall_ahead_s = wall_ahead_s
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        """A second entry of the same request replaces the first."""
        request, ahead_s = entry.request, self._wall_ahead_s()
        self._entries[request.id] = entry
        self._scheduler.add(
            Waiting(
                id=request.id,
                model=request.model,
                prompt_tokens=request.prefill_tokens,
                max_tokens=request.sampling.max_tokens,
                arrival_s=request.arrival_unix_s - ahead_s,
                deadline_s=request.deadline_unix_s - ahead_s,
            )
        )

    def pop(self, request_id: str) -> Entry | None:
        self._scheduler.remove([request_id])
        return self._entries.pop(request_id, None)

    def take(self, choose: Callable[[Entry], bool]) -> list[Entry]:
        """Remove and return the entries that `choose` accepts."""
        chosen = [entry for entry in self._entries.values() if choose(entry)]
        for entry in chosen:
            self.pop(entry.request.id)
        return chosen

    def keep_only(self, entry_ids: Collection[str]) -> None:
        """Drop what has left the queue without our doing."""
        self.take(lambda entry: entry.entry_id not in entry_ids)

    def counts(self) -> Counter[str]:
        """Model -> waiting requests."""
        return Counter(entry.request.model for entry in self._entries.values())

    def frontends(self) -> set[str]:
        return {entry.request.frontend_id for entry in self._entries.values()}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)
