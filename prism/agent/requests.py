"""The requests of this agent in one table, and the queue updates that Redis has not confirmed."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from prism import clock
from prism.messages.requests import Request
from prism.queueing import RequestQueue
from prism.scheduler.local import AdmissionPlan, LocalScheduler, Waiting
from prism.scheduler.ports import EngineView

ENDED_MAX = 10_000  # attempts that are remembered


class RequestState(Enum):
    WAITING = "waiting"  # in the device's queue
    ADMITTING = "admitting"  # Redis is being asked to admit it
    RUNNING = "running"  # on an engine
    ENDING = "ending"  # on an engine that was told to stop it; its output is dropped
    LEAVING = "leaving"  # between two engines: its KV is on its way to another machine


@dataclass(slots=True, eq=False)
class TrackedRequest:
    request: Request
    entry_id: str = ""  # in the queue's stream
    state: RequestState = RequestState.WAITING
    cancelled: bool = False  # while it was being admitted
    newer: TrackedRequest | None = None  # a later entry of the same id; it waits for this one's end
    engine_id: str = ""
    need_tokens: int = 0  # KV that it was admitted for
    started_unix_s: float = 0.0  # when it went to its engine
    prefilled: bool = False  # its first token came
    produced: int = 0  # output tokens that came, and those that came with it
    makes_way: bool = False  # its engine was told to hand it back, for a suspect
    shown: bool = False  # so did a status after it: the engine's figures have what it holds

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_on_trial(self) -> bool:
        """It has not outlived what its last engine died at."""
        suspected_at = self.request.suspected_at
        return suspected_at is not None and self.is_on_engine and self.produced <= suspected_at

    @property
    def is_on_engine(self) -> bool:
        return self.state in (RequestState.RUNNING, RequestState.ENDING)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int = 0
    pending_need_tokens: int = 0  # of requests whose memory its status does not show yet
    pending_prompt_tokens: int = 0  # of requests whose first token has not come
    on_trial: bool = False


class Update(Enum):
    """In the order in which they are sent."""

    REGISTER = "register"  # a request runs here, of which Redis may not know: it lost its data
    DISCARD = "discard"  # an entry waits, but its request ended here
    FINISH = "finish"  # a request ended
    MOVE = "move"  # a request ran here and goes on elsewhere
    REQUEUE = "requeue"  # a request was admitted, or may have been, and is on no engine
    FORGET = "forget"  # a request is unwanted, in whichever queue it waits
    UNPLACE = "unplace"  # an entry waits here, but its model does not come


Batch = dict[str, Request | None]


class PendingQueueUpdates:
    """Queue updates that Redis has not confirmed; retried until it does. Repeating is harmless.

    They are sent before each admission: a request that ended is acknowledged before its next
    attempt can be admitted here.
    """

    def __init__(self) -> None:
        self._pending: dict[Update, Batch] = {update: {} for update in Update}

    def add(self, update: Update, name: str, request: Request | None = None) -> None:
        """`name`: the entry's id for DISCARD and UNPLACE, else the request's. `request`: for
        REGISTER and FORGET, and for MOVE what it goes on as."""
        self._pending[update][name] = request

    def holds(self, request_id: str) -> bool:
        """Whether Redis may still take the request for one that runs here."""
        updates = (Update.FINISH, Update.MOVE, Update.REQUEUE)
        return any(request_id in self._pending[update] for update in updates)

    async def flush(self, queue: RequestQueue, device: str, epoch: int) -> None:
        """Raises QueueUnavailableError, LeaseLostError. Those added meanwhile stay: their order
        counts, too."""
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
    """By request id: at most one attempt of a request runs at a time. Those that wait are also in
    the local scheduler, which decides when they start. For one event loop.

    `wall_ahead_s`: the cluster's clock less the monotonic one. Deadlines are of the first on the
    wire and of the second in the scheduler. `none_runs` is set while no request is on an engine or
    leaves one for another machine.

    The poison rule: a request whose attempts killed two engines ends, by name. When an engine
    dies, all its requests are suspects and may be sent again. A suspect is tried alone: it starts
    before others and on an idle engine, for which what runs there makes way (it moves, and goes on
    later); nothing else starts until the suspect has more output than at the death: it is cleared.
    If the engine dies before that, the suspect is to blame: it ends as `request_killed_engines`,
    and neither death counts among its model's. Any other death makes suspects of all on the engine.
    """

    def __init__(
        self,
        scheduler: LocalScheduler,
        wall_ahead_s: Callable[[], float] = clock.ahead_s,
    ) -> None:
        self.outbox = PendingQueueUpdates()
        self.none_runs = asyncio.Event()
        self.none_runs.set()
        self._scheduler = scheduler
        self._wall_ahead_s = wall_ahead_s
        self._requests: dict[str, TrackedRequest] = {}
        self._on_engines: dict[str, TrackedRequest] = {}
        self.malformed_total = 0  # entries of the queue that were no requests
        self._ended: OrderedDict[str, int] = OrderedDict()  # id -> attempt, of the last ones

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._requests.get(request_id)

    # --- changes of state -------------------------------------------------------------------

    def wait(self, tracked: TrackedRequest) -> None:
        """A second entry of a waiting request replaces the first."""
        request, ahead_s = tracked.request, self._wall_ahead_s()
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
        """The scheduler's plan, and the requests of it that are ADMITTING now."""
        plan = self._scheduler.step(now_s, views)
        admitting = []
        for tracked in [self._requests[i] for ids in plan.starts.values() for i in ids]:
            if self.outbox.holds(tracked.id):
                self.wait(tracked)  # until its earlier attempt is acknowledged
            else:
                tracked.state = RequestState.ADMITTING
                admitting.append(tracked)
        return plan, admitting

    def start(self, tracked: TrackedRequest, engine_id: str, need_tokens: int) -> None:
        tracked.state = RequestState.RUNNING
        tracked.engine_id, tracked.need_tokens = engine_id, need_tokens
        tracked.produced = tracked.request.resumed_tokens
        self._requests[tracked.id] = self._on_engines[tracked.id] = tracked
        self.none_runs.clear()

    def drop(self, tracked: TrackedRequest) -> None:
        """It is here no more. Its newer entry, if there is one, waits from now on."""
        del self._requests[tracked.id]
        self._on_engines.pop(tracked.id, None)
        if not self._on_engines:
            self.none_runs.set()
        if tracked.state is RequestState.WAITING:
            self._scheduler.remove([tracked.id])
        if tracked.newer is not None:
            self.wait(tracked.newer)

    def leave(self, tracked: TrackedRequest) -> None:
        """Its engine has stopped it. For Redis it runs here until it goes on elsewhere."""
        tracked.state, tracked.engine_id = RequestState.LEAVING, ""

    def is_leaving(self, request: Request) -> bool:
        """Whether this attempt is: it may have ended meanwhile."""
        run = self._on_engines.get(request.id)
        return (
            run is not None
            and run.state is RequestState.LEAVING
            and run.request.attempt == request.attempt
        )

    def go_on(self, request: Request, now_unix_s: float) -> None:
        """Elsewhere, as this says, unless it has ended meanwhile."""
        run = self._on_engines.get(request.id)
        if run is not None and run.request.attempt == request.attempt:
            self.drop(run)
            self.outbox.add(Update.MOVE, run.id, request.going_on(now_unix_s))

    def finish(self, tracked: TrackedRequest) -> None:
        """It ended. Where a newer entry has come, Redis knows of the end already."""
        if tracked.newer is None:
            self.outbox.add(Update.FINISH, tracked.id)
        self.drop(tracked)
        self._ended[tracked.id] = tracked.request.attempt
        self._ended.move_to_end(tracked.id)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def has_ended(self, request: Request) -> bool:
        """Whether this attempt ended here, as far back as is known."""
        return self._ended.get(request.id, 0) >= request.attempt

    def register(self) -> None:
        """Redis may have lost its data: it is told again of what runs."""
        for tracked in self._on_engines.values():
            self.outbox.add(Update.REGISTER, tracked.id, tracked.request)

    # --- what waits -------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        return len(self._scheduler) > 0

    def waiting(self) -> list[TrackedRequest]:
        return [each for each in self._requests.values() if each.state is RequestState.WAITING]

    def waiting_counts(self) -> Counter[str]:
        """Model -> waiting requests."""
        return self._scheduler.waiting()

    def oldest_waits(self, now_unix_s: float) -> dict[str, float]:
        """Model -> for how long the first of its waiting requests has waited since it came."""
        found: dict[str, float] = {}
        for each in self.waiting():
            wait_s = now_unix_s - each.request.arrival_unix_s
            found[each.request.model] = max(wait_s, found.get(each.request.model, 0.0))
        return found

    # --- what runs --------------------------------------------------------------------------

    def running(self, request_id: str) -> TrackedRequest | None:
        """The request, if it is on an engine or has left one for another machine."""
        return self._on_engines.get(request_id)

    def on_engines(self) -> list[TrackedRequest]:
        return list(self._on_engines.values())

    def on_engine(self, engine_id: str) -> list[TrackedRequest]:
        return [each for each in self._on_engines.values() if each.engine_id == engine_id]

    def running_counts(self) -> Counter[str]:
        """Model -> requests on its engine."""
        return Counter(each.request.model for each in self._on_engines.values())

    def running_ids(self) -> set[str]:
        return set(self._on_engines)

    def status_came(self, engine_id: str) -> None:
        """Its figures are newer than the tokens that came before them."""
        for each in self.on_engine(engine_id):
            each.shown = each.prefilled

    def loads(self) -> dict[str, EngineLoad]:
        """Engine id -> its load; an engine without requests is not in it."""
        loads: dict[str, EngineLoad] = {}
        for each in self._on_engines.values():
            if not each.engine_id:
                continue
            load = loads.get(each.engine_id, EngineLoad())
            need_tokens = 0 if each.shown else each.need_tokens
            prompt_tokens = 0 if each.prefilled else each.request.prefill_tokens
            loads[each.engine_id] = EngineLoad(
                load.running + 1,
                load.pending_need_tokens + need_tokens,
                load.pending_prompt_tokens + prompt_tokens,
                load.on_trial or each.is_on_trial,
            )
        return loads

    # --- all --------------------------------------------------------------------------------

    def frontends(self) -> set[str]:
        return {each.request.frontend_id for each in self._requests.values()}

    def of_frontend(self, frontend_id: str) -> list[TrackedRequest]:
        return [r for r in self._requests.values() if r.request.frontend_id == frontend_id]

    def check_integrity(self, engine_ids: Collection[str]) -> list[str]:
        """What contradicts itself, in words. REQUIRES: no admission is under way; these are all
        engines."""
        found = [
            f"{request_id} ({tracked.state.value}): {problem}"
            for request_id, tracked in self._requests.items()
            for problem in self._problems(request_id, tracked, engine_ids)
        ]
        waiting, scheduled = len(self.waiting()), len(self._scheduler)
        if waiting != scheduled:
            found.append(f"{waiting} requests wait, and the scheduler has {scheduled}")
        running = sum(
            each.is_on_engine or each.state is RequestState.LEAVING
            for each in self._requests.values()
        )
        if running != len(self._on_engines):
            found.append(f"{running} requests run, and engines have {len(self._on_engines)}")
        if self.none_runs.is_set() != (running == 0):
            found.append(f"{running} requests run, and `none_runs` says otherwise")
        return found

    def _problems(
        self, request_id: str, tracked: TrackedRequest, engine_ids: Collection[str]
    ) -> Iterator[str]:
        if tracked.id != request_id:
            yield f"it stands under the id of {tracked.id}"
        if tracked.newer is not None and not tracked.is_on_engine:
            yield "a newer entry waits for its end, but it does not run"
        if tracked.state is RequestState.ADMITTING:
            yield "its admission was never completed"
        elif tracked.state is RequestState.WAITING:
            if request_id not in self._scheduler:
                yield "the scheduler does not know it"
        elif tracked.state is RequestState.LEAVING and request_id in self._on_engines:
            if tracked.engine_id or self.outbox.holds(request_id):
                yield "it has not left, or Redis is to be told that it does not run"
        elif tracked.engine_id not in engine_ids or request_id not in self._on_engines:
            yield f"its engine {tracked.engine_id!r} is gone"
        elif self.outbox.holds(request_id):
            yield "Redis is to be told that it does not run"
