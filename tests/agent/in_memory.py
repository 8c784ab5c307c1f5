"""Redis, an engine and a frontend in memory, for the table of requests under random events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from prism.agent.network.sockets import OutputBatch
from prism.errors import QueueUnavailableError
from prism.messages.engine import Export, Submit, ToEngine
from prism.messages.requests import Cancel, Failure, Request
from prism.policies.data import EngineView

Event = tuple[str, int]


@dataclass
class Record:
    request: Request
    entry_id: str
    runs: bool = False


class MemoryQueue:
    """One device's queue with the behaviour of the Lua scripts.

    `fails`: the next call fails, before or after it took effect. `meanwhile` runs during a call.
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.entries = 0
        self.fails = ""
        self.meanwhile: list[list[Event]] = []
        self.do = lambda event: None

    def put(self, request: Request) -> None:
        self.entries += 1
        self.records[request.id] = Record(request, f"{self.entries:04}")

    def enqueue(self, request: Request) -> None:
        record = self.records.get(request.id)
        if record is None or record.request.attempt < request.attempt:
            self.put(request)

    def waiting(self) -> list[Record]:
        waiting = (record for record in self.records.values() if not record.runs)
        return sorted(waiting, key=lambda record: record.entry_id)

    async def admit(self, device: str, epoch: int, entry_ids: Collection[str]) -> set[str]:
        found = [r for r in self._begin() if r.entry_id in entry_ids]
        for record in found:
            record.runs = True
        self._end()
        return {record.entry_id for record in found}

    async def register(self, device: str, epoch: int, requests: Collection[Request]) -> None:
        self._begin()
        for each in requests:
            known = self.records.get(each.id)
            older = known is None or known.request.attempt < each.attempt
            if older or (known and known.request.attempt == each.attempt and not known.runs):
                self.records[each.id] = Record(each, "", runs=True)
        self._end()

    async def discard(self, device: str, epoch: int, entry_ids: Collection[str]) -> None:
        for record in self._begin():
            if not record.runs and record.entry_id in entry_ids:
                del self.records[record.request.id]
        self._end()

    async def finish(self, device: str, epoch: int, request_ids: Collection[str]) -> None:
        for record in self._begin():
            if record.runs and record.request.id in request_ids:
                del self.records[record.request.id]
        self._end()

    async def requeue(self, device: str, epoch: int, request_ids: Collection[str]) -> None:
        for record in self._begin():
            if record.runs and record.request.id in request_ids:
                self.put(record.request)
        self._end()

    async def move(self, device: str, epoch: int, requests: Sequence[Request]) -> None:
        moved = {each.id: each for each in requests}
        for record in self._begin():
            if record.runs and record.request.id in moved:
                self.put(moved[record.request.id])
        self._end()

    async def unplace(self, device: str, epoch: int, entry_ids: Collection[str]) -> None:
        """Enqueues the requests again: the scheduler places the model here at once."""
        for record in self._begin():
            if not record.runs and record.entry_id in entry_ids:
                self.put(record.request)
        self._end()

    async def forget_attempts(self, attempts: Mapping[str, int]) -> None:
        for record in self._begin():
            if not record.runs and record.request.attempt <= attempts.get(record.request.id, 0):
                del self.records[record.request.id]
        self._end()

    def _wait(self) -> None:
        for event in self.meanwhile.pop() if self.meanwhile else ():
            self.do(event)

    def _begin(self) -> list[Record]:
        self._wait()
        if self.fails == "before":
            self._fail()
        return list(self.records.values())

    def _end(self) -> None:
        self._wait()
        if self.fails == "after":
            self._fail()

    def _fail(self) -> None:
        self.fails = ""
        raise QueueUnavailableError("the connection broke")


class OneEngine:
    """A model's engine, its view and its socket: two slots, and orders to cancel."""

    def __init__(self) -> None:
        self.runs: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.ended: set[tuple[str, int]] = set()
        self.exporting = False
        self.is_on_trial = lambda: False

    def read(self) -> list[EngineView]:
        on_trial = self.is_on_trial()
        return [EngineView("a", 1000, len(self.runs), 2, 16, 1e6, on_trial=on_trial)]

    def send(self, engine_id: str, message: ToEngine) -> bool:
        if isinstance(message, Submit):
            for each in message.requests:
                assert each.id not in self.runs, "it runs twice"
                assert (each.id, each.attempt) not in self.ended, "it runs again"
                self.runs[each.id] = each
        elif isinstance(message, Cancel):
            self.cancelled.update(i for i in message.request_ids if i in self.runs)
        elif isinstance(message, Export):
            self.exporting = True
        return True


class Frontend:
    """Frontend whose requests in `open` have not ended; `again` sends a request once more."""

    def __init__(self, again: Callable[[str, int | None], None]) -> None:
        self.open: dict[str, Request] = {}
        self.deaths: Counter[str] = Counter()  # of engines, by request
        self._again = again

    def send(self, batch: OutputBatch) -> None:
        for output in batch.outputs.values():
            for chunk in output.chunks:
                if chunk.finish_reason is not None:
                    self._take_end(chunk.request_id, chunk.attempt, chunk.finish_reason == "stop")
            for failure in output.failures:
                self._take_failure(failure)

    def _take_failure(self, failure: Failure) -> None:
        died = failure.code in ("engine_died", "request_killed_engines")
        self.deaths[failure.request_id] += died
        if not failure.retryable:
            assert self.deaths[failure.request_id] >= 2, "one death is no guilt"
        suspected_at = failure.output_tokens if failure.blame == "suspect" else None
        self._take_end(failure.request_id, failure.attempt, not failure.retryable, suspected_at)

    def _take_end(
        self, request_id: str, attempt: int, final: bool, suspected_at: int | None = None
    ) -> None:
        request = self.open.get(request_id)
        if request is None or request.attempt != attempt:
            return
        if final:
            del self.open[request_id]
        else:
            self._again(request_id, suspected_at)
