"""Table of this agent's requests, and the queue updates that Redis has not confirmed."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from prism import clock
from prism.messages.requests import Request
from prism.policies.data import EngineView, Waiting
from prism.queueing import RequestQueue
from prism.scheduler.local_scheduler import AdmissionPlan, LocalScheduler

ENDED_MAX = 10_000  # ended attempts to remember


class RequestState(Enum):
    WAITING = "waiting"  # in the device's queue
    ADMITTING = "admitting"  # the call to admit it in Redis is in progress
    RUNNING = "running"  # on an engine
    ENDING = "ending"  # on an engine that was ordered to stop it; its output is dropped
    LEAVING = "leaving"  # between two engines, while its KV is sent to another machine


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """Request in the agent's table."""

    request: Request
    entry_id: str = ""  # in the queue's stream
    state: RequestState = RequestState.WAITING
    cancelled: bool = False  # True if it was cancelled while ADMITTING
    newer: TrackedRequest | None = None  # later entry of the same id, waiting for this one's end
    engine_id: str = ""
    # KV tokens that it was admitted for; 0 once its engine's status includes its memory
    need_tokens: int = 0
    started_unix_s: float = 0.0  # when it was submitted to its engine
    prefilled: bool = False  # True if its first token has arrived
    produced: int = 0  # output tokens so far, including those of earlier engines
    executed_s: float = 0.0  # total time of its steps here, under step control
    stepped_s: float = 0.0  # monotonic end of its last step here, under step control; 0: none
    preempted: bool = False  # True if its engine was ordered to export it while its model stays

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_on_trial(self) -> bool:
        """True if it is a suspect whose output has not grown since its last engine died."""
        suspected_at = self.request.suspected_at
        return suspected_at is not None and self.is_on_engine and self.produced <= suspected_at

    @property
    def is_on_engine(self) -> bool:
        return self.state in (RequestState.RUNNING, RequestState.ENDING)

    @property
    def is_running(self) -> bool:
        """True if it runs here for Redis: on an engine, or between two."""
        return self.is_on_engine or self.state is RequestState.LEAVING


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests on one engine."""

    running: int = 0  # number of requests
    pending_need_tokens: int = 0  # of requests whose memory its last status does not include
    pending_prompt_tokens: int = 0  # of requests whose first token has not arrived
    on_trial: bool = False  # True if a suspect runs there


class Update(Enum):
    """Kinds of queue updates, in the order in which they are sent."""

    REGISTER = "register"  # a request runs here, but Redis may have lost it
    DISCARD = "discard"  # an entry waits, but its request ended here
    FINISH = "finish"  # a request ended
    MOVE = "move"  # a request ran here and resumes elsewhere
    REQUEUE = "requeue"  # a request is or may be admitted, but is on no engine
    FORGET = "forget"  # a request is not wanted any more, in whichever queue it waits
    UNPLACE = "unplace"  # an entry waits here, but its model is not here


Batch = dict[str, Request | None]


class PendingQueueUpdates:
    """Queue updates that are retried until Redis confirms them. Repeating one has no effect.

    They are sent before each admission, so that a request that ended is acknowledged before its
    next attempt can be admitted here.
    """

    def __init__(self) -> None:
        self._pending: dict[Update, Batch] = {update: {} for update in Update}

    def add(self, update: Update, name: str, request: Request | None = None) -> None:
        """Adds an update.

        Args:
            update: its kind.
            name: id of the entry for DISCARD and UNPLACE, else id of the request.
            request: the request for REGISTER and FORGET, and its new form for MOVE.
        """
        self._pending[update][name] = request

    def has_end_of(self, request_id: str) -> bool:
        """Returns whether an update is pending that ends the request's run here for Redis."""
        updates = (Update.FINISH, Update.MOVE, Update.REQUEUE)
        return any(request_id in self._pending[update] for update in updates)

    async def flush(self, queue: RequestQueue, device: str, epoch: int) -> None:
        """Sends all updates. Raises QueueUnavailableError or LeaseLostError.

        Updates that are added meanwhile are kept for the next call, to preserve the order.
        """
        sending, self._pending = self._pending, {update: {} for update in Update}
        try:
            for update, batch in sending.items():
                if batch:
                    await self._send(update, batch, queue, device, epoch)
                    sending[update] = {}
        finally:
            for update, batch in sending.items():
                self._pending[update] = batch | self._pending[update]

    async def _send(
        self, update: Update, batch: Batch, queue: RequestQueue, device: str, epoch: int
    ) -> None:
        calls = {
            Update.DISCARD: queue.discard,
            Update.FINISH: queue.finish,
            Update.REQUEUE: queue.requeue,
            Update.UNPLACE: queue.unplace,
        }
        requests = [request for request in batch.values() if request is not None]
        if update is Update.REGISTER:
            await queue.register(device, epoch, requests)
        elif update is Update.MOVE:
            await queue.move(device, epoch, requests)
        elif update is Update.FORGET:
            await queue.forget_attempts({each.id: each.attempt for each in requests})
        else:
            await calls[update](device, epoch, batch)


class RequestTable:
    """Requests by id. At most one attempt of a request runs at a time. For one event loop.

    Waiting requests are also in the local scheduler, which decides when they start.

    The poison rule: a request whose attempts killed two engines fails with
    `request_killed_engines`. When an engine dies, all its requests become suspects and may be sent
    again. A suspect runs alone: it starts before other requests, on an idle engine, whose running
    requests are preempted for it and resume later. Nothing else starts there until the suspect has
    more output than at the engine's death, which clears it. If the engine dies before that, the
    suspect is the cause and fails; neither death counts for its model. Any other death makes
    suspects of all requests on the engine.

    Args:
        scheduler: the local scheduler.
        wall_ahead_s: returns the cluster's clock minus the monotonic one. Deadlines on the wire are
            on the first clock, those in the scheduler on the second.
    """

    def __init__(
        self,
        scheduler: LocalScheduler,
        wall_ahead_s: Callable[[], float] = clock.ahead_s,
    ) -> None:
        self.outbox = PendingQueueUpdates()
        self.none_runs = asyncio.Event()
        """Set while no request is RUNNING, ENDING or LEAVING."""
        self.none_runs.set()
        self.woken = asyncio.Event()
        """Set when requests may start or queue updates are pending."""
        self._scheduler = scheduler
        self.wall_ahead_s = wall_ahead_s
        self.changes = 0  # number of events after which another request may start
        self._requests: dict[str, TrackedRequest] = {}
        self._on_engines: dict[str, TrackedRequest] = {}
        self.malformed_total = 0  # malformed entries of the queue
        self._ended: OrderedDict[str, int] = OrderedDict()  # id -> attempt of the last ended ones

    def wake(self) -> None:
        self.woken.set()

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._requests.get(request_id)

    # --- changes of state -------------------------------------------------------------------

    def wait(self, tracked: TrackedRequest) -> None:
        """Adds a waiting request. A second entry of a waiting request replaces the first."""
        request, ahead_s = tracked.request, self.wall_ahead_s()
        self.changes += 1
        tracked.state = RequestState.WAITING
        self._requests[request.id] = tracked
        self._scheduler.add(
            Waiting(
                id=request.id,
                model=request.model,
                prompt_tokens=request.prefill_tokens,
                max_tokens=request.sampling.max_tokens,
                arrival_s=request.arrival_unix_s - ahead_s,
                deadline_s=request.deadline_unix_s - ahead_s,
                suspected_at=request.suspected_at if request.is_suspect else None,
                priority=request.priority,
            )
        )

    def plan(
        self, now_s: float, views: Sequence[EngineView]
    ) -> tuple[AdmissionPlan, list[TrackedRequest]]:
        """Returns the scheduler's plan, and the requests that it starts, now ADMITTING."""
        plan = self._scheduler.step(now_s, views)
        return plan, self.admit([i for ids in plan.starts.values() for i in ids])

    def admit(self, request_ids: Sequence[str]) -> list[TrackedRequest]:
        """Returns the waiting requests that start, now ADMITTING."""
        self._scheduler.remove(request_ids)
        admitting = []
        for tracked in [self._requests[i] for i in request_ids]:
            if self.outbox.has_end_of(tracked.id):
                self.wait(tracked)  # until its earlier attempt is acknowledged
            else:
                tracked.state = RequestState.ADMITTING
                admitting.append(tracked)
        return admitting

    def start(self, tracked: TrackedRequest, engine_id: str, need_tokens: int) -> None:
        tracked.state = RequestState.RUNNING
        tracked.engine_id, tracked.need_tokens = engine_id, need_tokens
        tracked.produced = tracked.request.resumed_tokens
        self._requests[tracked.id] = self._on_engines[tracked.id] = tracked
        self.none_runs.clear()

    def drop(self, tracked: TrackedRequest) -> None:
        """Removes a request. Its newer entry, if any, waits from now on."""
        self.changes += 1
        del self._requests[tracked.id]
        self._on_engines.pop(tracked.id, None)
        if not self._on_engines:
            self.none_runs.set()
        if tracked.state is RequestState.WAITING:
            self._scheduler.remove([tracked.id])
        if tracked.newer is not None:
            self.wait(tracked.newer)

    def leave(self, tracked: TrackedRequest) -> None:
        """Marks a request that its engine has stopped. In Redis it runs here until `move`."""
        tracked.state, tracked.engine_id = RequestState.LEAVING, ""

    def is_leaving(self, request: Request) -> bool:
        """Returns whether this attempt is still LEAVING: it may have ended meanwhile."""
        run = self.running(request.id, request.attempt)
        return run is not None and run.state is RequestState.LEAVING

    def move(self, request: Request, now_unix_s: float) -> None:
        """Sends a request, in this form, to resume elsewhere, unless it has ended meanwhile."""
        run = self.running(request.id, request.attempt)
        if run is not None:
            self.drop(run)
            self.outbox.add(Update.MOVE, run.id, request.as_resumed(now_unix_s))

    def finish(self, tracked: TrackedRequest) -> None:
        """Removes a request that ended. If a newer entry exists, Redis knows of the end already."""
        if tracked.newer is None:
            self.outbox.add(Update.FINISH, tracked.id)
        self.drop(tracked)
        self._ended[tracked.id] = tracked.request.attempt
        self._ended.move_to_end(tracked.id)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def has_ended(self, request: Request) -> bool:
        """Returns whether this attempt is among the last ENDED_MAX that ended here."""
        return self._ended.get(request.id, 0) >= request.attempt

    def register(self) -> None:
        """Registers running requests again, because Redis may have lost them; `finish` does not
        report one with a newer attempt."""
        for tracked in [each for each in self._on_engines.values() if each.newer is None]:
            self.outbox.add(Update.REGISTER, tracked.id, tracked.request)

    # --- waiting requests -------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        return len(self._scheduler) > 0

    def waiting(self) -> list[TrackedRequest]:
        return [each for each in self._requests.values() if each.state is RequestState.WAITING]

    def waiting_counts(self) -> Counter[str]:
        """Returns model -> number of waiting requests."""
        return self._scheduler.waiting()

    def oldest_waits(self, now_unix_s: float) -> dict[str, float]:
        """Returns model -> longest time since the arrival of one of its waiting requests."""
        found: dict[str, float] = {}
        for each in self.waiting():
            wait_s = now_unix_s - each.request.arrival_unix_s
            found[each.request.model] = max(wait_s, found.get(each.request.model, 0.0))
        return found

    # --- running requests -------------------------------------------------------------------

    def running(self, request_id: str, attempt: int) -> TrackedRequest | None:
        """Returns the attempt if it is RUNNING, ENDING or LEAVING."""
        run = self._on_engines.get(request_id)
        return run if run is not None and run.request.attempt == attempt else None

    def on_engines(self) -> list[TrackedRequest]:
        return list(self._on_engines.values())

    def on_engine(self, engine_id: str) -> list[TrackedRequest]:
        return [each for each in self._on_engines.values() if each.engine_id == engine_id]

    def running_counts(self) -> Counter[str]:
        """Returns model -> number of requests on its engine."""
        return Counter(each.request.model for each in self._on_engines.values())

    def running_ids(self) -> set[str]:
        return set(self._on_engines)

    def mark_usage_reported(self, engine_id: str) -> None:
        """Handles a status of an engine: it includes requests whose first token came before it."""
        for each in self.on_engine(engine_id):
            if each.prefilled and each.need_tokens:
                each.need_tokens = 0
                self.changes += self.has_waiting

    def loads(self) -> dict[str, EngineLoad]:
        """Returns engine id -> load of engines with requests."""
        loads: dict[str, EngineLoad] = {}
        for each in self._on_engines.values():
            if not each.engine_id:
                continue
            load = loads.get(each.engine_id, EngineLoad())
            prompt_tokens = 0 if each.prefilled else each.request.prefill_tokens
            loads[each.engine_id] = EngineLoad(
                load.running + 1,
                load.pending_need_tokens + each.need_tokens,
                load.pending_prompt_tokens + prompt_tokens,
                load.on_trial or each.is_on_trial,
            )
        return loads

    # --- all requests -----------------------------------------------------------------------

    def frontends(self) -> set[str]:
        return {each.request.frontend_id for each in self._requests.values()}

    def of_frontend(self, frontend_id: str) -> list[TrackedRequest]:
        return [r for r in self._requests.values() if r.request.frontend_id == frontend_id]

    def check_integrity(self, engine_ids: Collection[str]) -> list[str]:
        """Returns a description of each inconsistency.

        REQUIRES: no admission is in progress; `engine_ids` has all engines.
        """
        found = [
            f"{request_id} ({tracked.state.value}): {problem}"
            for request_id, tracked in self._requests.items()
            for problem in self._problems(request_id, tracked, engine_ids)
        ]
        waiting, scheduled = len(self.waiting()), len(self._scheduler)
        if waiting != scheduled:
            found.append(f"{waiting} requests wait, but the scheduler has {scheduled}")
        running = sum(each.is_running for each in self._requests.values())
        if running != len(self._on_engines):
            found.append(f"{running} requests run, but engines have {len(self._on_engines)}")
        if self.none_runs.is_set() != (running == 0):
            found.append(f"{running} requests run, but `none_runs` is {self.none_runs.is_set()}")
        return found

    def _problems(
        self, request_id: str, tracked: TrackedRequest, engine_ids: Collection[str]
    ) -> Iterator[str]:
        if tracked.id != request_id:
            yield f"it is stored under the id of {tracked.id}"
        if tracked.newer is not None and not tracked.is_on_engine:
            yield "a newer entry waits for its end, but it does not run"
        if tracked.state is RequestState.ADMITTING:
            yield "its admission was never completed"
        elif tracked.state is RequestState.WAITING:
            if request_id not in self._scheduler:
                yield "the scheduler does not have it"
        elif tracked.state is RequestState.LEAVING and request_id in self._on_engines:
            if tracked.engine_id or self.outbox.has_end_of(request_id):
                yield "it has an engine, or an update is pending that it does not run"
        elif tracked.engine_id not in engine_ids or request_id not in self._on_engines:
            yield f"its engine {tracked.engine_id!r} is gone"
        elif self.outbox.has_end_of(request_id):
            yield "an update is pending that it does not run"
