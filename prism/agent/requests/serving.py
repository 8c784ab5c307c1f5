"""Path of a request through the agent: waiting, admitted, running, ended.

Everything here runs in one event loop. Only `step` changes requests in Redis, so acknowledgements
and admissions cannot overtake each other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from prism import clock
from prism.agent.engines.reclaimer import Reclaimer
from prism.agent.network.sockets import (
    EngineLink,
    OutputBatch,
    TokenSender,
    retryable,
    silent_frontend,
)
from prism.agent.requests.admission import EngineViews
from prism.agent.state.device_state import DeviceState
from prism.agent.state.request_table import RequestState, TrackedRequest, Update
from prism.errors import LeaseLostError, QueueUnavailableError
from prism.messages.engine import Export, Submit
from prism.messages.requests import (
    Cancel,
    Chunk,
    EngineOutput,
    Failure,
    Request,
    Started,
)
from prism.queueing import RequestQueue

log = logging.getLogger(__name__)

GONE_MAX = 256  # ended frontends to remember


class Serving:
    """Handler of all events of requests.

    Args:
        wake: called when requests may start or queue updates are pending.
        headroom_tokens: as in the scheduler's `Limits`.
        send_kv: see `KvSender.begin`.
        now_unix_s: the cluster's clock.
    """

    def __init__(
        self,
        *,
        state: DeviceState,
        views: EngineViews,
        reclaimer: Reclaimer,
        queue: RequestQueue,
        device: str,
        engines: EngineLink,
        tokens: TokenSender,
        wake: Callable[[], None],
        headroom_tokens: int,
        send_kv: Callable[[Sequence[Request], str, Callable[[Request], None]], None],
        now_unix_s: Callable[[], float] = clock.unix_s,
    ) -> None:
        self._state = state
        self._requests = state.requests
        self._views = views
        self._reclaimer = reclaimer
        self._queue = queue
        self._device = device
        self._engines = engines
        self._tokens = tokens
        self.wake = wake
        self._headroom_tokens, self._send_kv = headroom_tokens, send_kv
        self._now_unix_s = now_unix_s
        self.paused = False
        self._gone: deque[str] = deque(maxlen=GONE_MAX)

    # --- arrivals ---------------------------------------------------------------------------

    def arrived(self, entry_id: str, request: Request) -> None:
        """Handles an entry of the queue, perhaps not for the first time."""
        known = self._requests.get(request.id)
        entry = TrackedRequest(request, entry_id)
        if request.frontend_id in self._gone:
            self._requests.outbox.add(Update.FORGET, request.id, request)
        elif self._requests.has_ended(request):
            self._fail_ended(entry)
        elif known is None or known.state is RequestState.WAITING:
            self._requests.wait(entry)
        elif known.state is RequestState.ADMITTING:
            if known.entry_id != entry_id:
                known.newer = entry
        elif request.attempt > known.request.attempt:
            known.newer = entry
            self._stop(known)
        else:
            self._requests.outbox.add(Update.REGISTER, request.id, known.request)
        self.wake()

    def _fail_ended(self, entry: TrackedRequest) -> None:
        """Fails an attempt that ended here before.

        Redis lost its data, and the frontend sent the request again because it had not seen the
        end. The end was sent before this failure: if the frontend gets this first, the end is lost.
        """
        self._requests.outbox.add(Update.DISCARD, entry.entry_id)
        text = "the request ended, and its output did not arrive"
        batch = OutputBatch()
        batch.failure(entry.request, retryable(entry.request, "output_lost", text))
        self._tokens.send(batch)

    def malformed(self, entries: Mapping[str, tuple[str, int]], frontends: Collection[str]) -> None:
        """Fails the requests of malformed entries that were set aside.

        The frontend that sent one of them still has the request and may send it again.

        Args:
            entries: entry id -> (request id, attempt).
            frontends: the live frontends, one of which sent them.
        """
        self._requests.malformed_total += len(entries)
        batch = OutputBatch()
        for request_id, attempt in entries.values():
            log.error("the queue's entry of request %.100r is malformed", request_id)
            text = "the queue's copy of the request is malformed"
            failure = Failure(request_id, attempt, "malformed_request", text, retryable=True)
            for frontend_id in frontends:
                batch.output(frontend_id).failures.append(failure)
        self._tokens.send(batch)

    def replayed(self, entry_ids: Collection[str]) -> None:
        """Drops waiting requests whose entries are not among those that wait in the queue."""
        for tracked in self._requests.waiting():
            if tracked.entry_id not in entry_ids:
                self._requests.drop(tracked)

    def unplace(self, models: Collection[str]) -> None:
        """Moves waiting requests of these models to the unplaced queue."""
        for tracked in self._requests.waiting():
            if tracked.request.model in models:
                self._requests.outbox.add(Update.UNPLACE, tracked.entry_id)
                self._requests.drop(tracked)
                self.wake()

    # --- admission --------------------------------------------------------------------------

    async def step(self, epoch: int) -> None:
        """Sends queue updates to Redis, then admits and submits the requests that start now.

        Raises QueueUnavailableError or LeaseLostError; the next step then does the rest.
        """
        await self._requests.outbox.flush(self._queue, self._device, epoch)
        if self.paused or not self._requests.has_waiting:
            return
        plan, admitting = self._requests.plan(self._state.now_s(), self._views.read())
        for model, tokens in plan.lacking.items():
            self._reclaimer.reclaim_tokens(tokens, model)
        for model in plan.preempt:
            self._preempt(model)
        if admitting:
            await self._admit(admitting, epoch)

    def _preempt(self, model: str) -> None:
        """Orders the model's engine to export its requests, which resume after a suspect."""
        hosted = self._state.models.active(model)
        runs = self._requests.on_engine(hosted.engine_id) if hosted else []
        new = [run for run in runs if run.state is RequestState.RUNNING and not run.preempted]
        for run in new:
            run.preempted = True
        if hosted and new:
            self._engines.send(hosted.engine_id, Export())

    async def _admit(self, admitting: list[TrackedRequest], epoch: int) -> None:
        try:
            admitted = await self._queue.admit(self._device, epoch, [t.entry_id for t in admitting])
        except (QueueUnavailableError, LeaseLostError):
            for tracked in admitting:
                self._put_back(tracked)
            raise
        by_model: dict[str, list[TrackedRequest]] = {}
        for tracked in admitting:
            if tracked.entry_id in admitted:
                by_model.setdefault(tracked.request.model, []).append(tracked)
                continue
            if tracked.cancelled:  # its entry is stale; the request may wait in another one
                self._requests.outbox.add(Update.FORGET, tracked.id, tracked.request)
            self._requests.drop(tracked)
        for model, chosen in by_model.items():
            self._submit(model, chosen)

    def _put_back(self, tracked: TrackedRequest) -> None:
        """Lets a request wait again after a failed admission.

        Redis may have admitted it nevertheless. So it is requeued, since a full read or a
        cancellation would not find it otherwise.
        """
        self._requests.outbox.add(Update.REQUEUE, tracked.id)
        if tracked.cancelled:
            self._requests.outbox.add(Update.FORGET, tracked.id, tracked.request)
        if tracked.cancelled or tracked.newer is not None:
            self._requests.drop(tracked)
        else:
            self._requests.wait(tracked)

    def _submit(self, model: str, admitted: list[TrackedRequest]) -> None:
        """Submits requests to the model's engine, if it is still there after the call to Redis."""
        hosted = self._state.models.active(model)
        started = []
        for tracked in admitted:
            if tracked.cancelled:
                self._requests.finish(tracked)
            elif hosted is None:
                self._requests.outbox.add(Update.REQUEUE, tracked.id)
                self._requests.drop(tracked)
            else:
                self._start(tracked, hosted.engine_id)
                started.append(tracked)
        if hosted is not None and started:
            self._engines.send(hosted.engine_id, Submit([each.request for each in started]))
        for tracked in started:
            self._choose_attempt(tracked)

    def _choose_attempt(self, started: TrackedRequest) -> None:
        """Chooses between a request and an entry of it that was read during its admission."""
        if started.newer is None:
            return
        if started.newer.request.attempt > started.request.attempt:
            self._stop(started)
        else:
            started.newer = None
            self._requests.outbox.add(Update.REGISTER, started.id, started.request)

    def _start(self, tracked: TrackedRequest, engine_id: str) -> None:
        request, engine = tracked.request, self._state.pool.get(engine_id)
        block = engine.activated.block_tokens if engine and engine.activated else 1
        headroom = min(request.sampling.max_tokens, self._headroom_tokens)
        need_tokens = -(-(request.known_tokens + headroom) // block) * block
        self._requests.start(tracked, engine_id, need_tokens)
        totals = self._state.models.totals(request.model)
        totals.prompt_tokens += len(request.prompt_ids)
        totals.last_request_unix_s = tracked.started_unix_s = self._now_unix_s()

    # --- output -----------------------------------------------------------------------------

    def output(self, engine_id: str, output: EngineOutput) -> None:
        """Forwards an engine's output. Output of attempts that do not run here is dropped."""
        batch = OutputBatch()
        for chunk in output.chunks:
            if run := self._running(engine_id, chunk.request_id, chunk.attempt):
                self._take_chunk(run, chunk, batch)
        for failure in output.failures:
            if run := self._running(engine_id, failure.request_id, failure.attempt):
                self._take_failure(run, failure, batch)
        self._tokens.send(batch)

    def moved(self, engine_id: str, requests: Sequence[Request]) -> None:
        """Moves requests that an engine has stopped to their model's present placement.

        KV for another machine is sent before its request moves.
        """
        hosted = self._state.models.on_engine(engine_id)
        leaving = []
        for request in requests:
            run = self._running(engine_id, request.id, request.attempt)
            if run is None:
                continue
            if run.state is RequestState.ENDING:
                self._ended(run)
            elif hosted and hosted.kv_target and request.resume and request.resume.kv_path:
                self._requests.leave(run)
                leaving.append(request)
            else:
                self._move(request)
        if hosted and leaving:
            self._send_kv(leaving, hosted.kv_target, self._move)

    def _move(self, request: Request) -> None:
        self._requests.move(request, self._now_unix_s())
        self.wake()

    def engine_lost(self, engine_id: str, why: str, by_request: bool = True) -> bool:
        """Fails all requests of a dead engine.

        Frontends may send them again, except one that caused the death (see `RequestTable`).
        Returns whether there is one.

        Args:
            by_request: whether one of the requests may be the cause.
        """
        batch, runs = OutputBatch(), self._requests.on_engine(engine_id)
        caused_by_request = by_request and len(runs) == 1 and runs[0].is_on_trial
        for run in runs:
            if caused_by_request:
                self._fail_poison(run, why, batch)
                continue
            text = f"the engine process that served {run.request.model} died: {why}"
            failure = retryable(run.request, "engine_died", text)
            if by_request:
                changes = {"blame": "suspect", "output_tokens": run.produced}
                failure = msgspec.structs.replace(failure, **changes)
            self._take_failure(run, failure, batch)
        self._tokens.send(batch)
        return caused_by_request

    def _fail_poison(self, run: TrackedRequest, why: str, batch: OutputBatch) -> None:
        """Fails a request permanently, and a newer attempt that waits for its end."""
        text = f"this request killed two engines; the last one: {why}"
        log.error("%s fails: %s", run.id, text)
        failure = Failure(run.id, run.request.attempt, "request_killed_engines", text)
        if (newer := run.newer) is not None:
            run.newer = None
            self._requests.outbox.add(Update.FORGET, run.id, newer.request)
            again = msgspec.structs.replace(failure, attempt=newer.request.attempt)
            batch.failure(newer.request, again)
        self._take_failure(run, failure, batch)

    def fail_all(self, why: str) -> None:
        """Fails all running requests at the agent's end. They may be sent again."""
        batch = OutputBatch()
        for run in self._requests.on_engines():
            self._take_failure(run, retryable(run.request, "agent_stopped", why), batch)
        self._tokens.send(batch)

    def _running(self, engine_id: str, request_id: str, attempt: int) -> TrackedRequest | None:
        """Returns the attempt if it runs on this engine."""
        run = self._requests.running(request_id)
        here = run is not None and run.engine_id == engine_id and run.request.attempt == attempt
        return run if here else None

    def _take_chunk(self, run: TrackedRequest, chunk: Chunk, batch: OutputBatch) -> None:
        totals = self._state.models.totals(run.request.model)
        totals.output_tokens += len(chunk.token_ids)
        was_on_trial, run.produced = run.is_on_trial, chunk.first_index + len(chunk.token_ids)
        is_forwarded = run.state is RequestState.RUNNING
        if is_forwarded and not run.prefilled:
            started = Started(run.id, run.request.attempt, self._device, run.started_unix_s)
            batch.started(run.request, started)
        if not run.prefilled or was_on_trial:
            run.prefilled = True
            self.wake()
        if is_forwarded:
            batch.chunk(run.request, chunk)
        if chunk.finish_reason is not None:
            if chunk.finish_reason == "cancelled":
                totals.cancelled += 1
            else:
                totals.finished += 1
            self._ended(run)

    def _take_failure(self, run: TrackedRequest, failure: Failure, batch: OutputBatch) -> None:
        self._state.models.totals(run.request.model).failed += 1
        if run.state is not RequestState.ENDING:
            batch.failure(run.request, failure)
        self._ended(run)

    def _ended(self, run: TrackedRequest) -> None:
        self._requests.finish(run)
        self._state.models.totals(run.request.model).last_request_unix_s = self._now_unix_s()
        self.wake()

    # --- cancellations ----------------------------------------------------------------------

    def cancel(self, request_ids: Collection[str]) -> None:
        """Cancels requests for their frontend.

        Unknown ids are ignored, because a cancellation is sent to all agents.
        """
        batch = OutputBatch()
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is None:
                continue
            if not tracked.is_on_engine:
                attempt = tracked.request.attempt
                batch.chunk(tracked.request, Chunk(request_id, attempt, 0, [], "cancelled"))
            self._cancel(tracked)
        self._tokens.send(batch)
        self.wake()

    def _cancel(self, tracked: TrackedRequest) -> None:
        if tracked.newer is not None:
            self._requests.outbox.add(Update.FORGET, tracked.id, tracked.newer.request)
            tracked.newer = None
        if tracked.is_on_engine:
            self._engines.send(tracked.engine_id, Cancel([tracked.id]))
        elif tracked.state is RequestState.LEAVING:
            self._ended(tracked)
        elif tracked.state is RequestState.ADMITTING:
            tracked.cancelled = True
        else:
            self._forget(tracked)

    def frontend_gone(self, frontend_id: str) -> None:
        """Cancels all requests of a frontend that ended, including those not read yet."""
        self._gone.append(frontend_id)
        for tracked in self._requests.of_frontend(frontend_id):
            self._cancel(tracked)
            if tracked.is_on_engine:
                tracked.state = RequestState.ENDING
        self.wake()

    def frontend_died(self, frontend_id: str) -> None:
        """Stops and drops all requests of a silent frontend.

        A failure is sent for each: a frontend that was only suspended would wait for their output.
        """
        batch = OutputBatch()
        for run in self._requests.on_engines():
            if run.request.frontend_id == frontend_id and run.state is not RequestState.ENDING:
                self._stop(run)
                batch.failure(run.request, silent_frontend(run.request))
        for tracked in self._requests.waiting():
            if tracked.request.frontend_id == frontend_id:
                self._forget(tracked)
                batch.failure(tracked.request, silent_frontend(tracked.request))
        self._tokens.send(batch)
        self.wake()

    def _forget(self, waiting: TrackedRequest) -> None:
        self._requests.drop(waiting)
        self._requests.outbox.add(Update.FORGET, waiting.id, waiting.request)

    def _stop(self, run: TrackedRequest) -> None:
        """Orders the engine to stop a request, whose output is dropped from now on."""
        if run.state is RequestState.LEAVING:
            self._ended(run)
            return
        run.state = RequestState.ENDING
        self._engines.send(run.engine_id, Cancel([run.id]))
