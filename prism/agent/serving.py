"""A request's way through the agent: waiting, admitted, running, ended.

Everything here runs in one event loop. Only `turn` changes Redis on behalf of requests, so
acknowledgements and admissions cannot overtake each other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from prism import clock
from prism.agent.admission import EngineViews
from prism.agent.memory import Reclaimer
from prism.agent.requests import RequestState, TrackedRequest, Update
from prism.agent.sockets import EngineLink, OutputBatch, TokenSender, retryable, silent_frontend
from prism.agent.state import DeviceState
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

GONE_MAX = 256  # ids of frontends that are remembered


class Serving:
    """`wake`: something happened after which requests may start, or queue updates are pending.
    headroom_tokens: as the scheduler's limits have it. send_kv: see `KvSender.begin`. now_unix_s:
    the cluster's clock."""

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
        """An entry of the queue, perhaps seen before."""
        known = self._requests.get(request.id)
        entry = TrackedRequest(request, entry_id)
        if request.frontend_id in self._gone:
            self._requests.outbox.add(Update.FORGET, request.id, request)
        elif self._requests.has_ended(request):
            self._end_again(entry)
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

    def _end_again(self, entry: TrackedRequest) -> None:
        """Redis lost its data, and the frontend, which had not seen this attempt's end, sent it
        again. The end has gone out before this failure: if it is not there by now, it is lost."""
        self._requests.outbox.add(Update.DISCARD, entry.entry_id)
        text = "the request ended, and its output did not arrive"
        batch = OutputBatch()
        batch.failure(entry.request, retryable(entry.request, "output_lost", text))
        self._tokens.send(batch)

    def malformed(self, entries: Mapping[str, tuple[str, int]], frontends: Collection[str]) -> None:
        """Entries of the queue that are no requests have left it. Whoever of `frontends` sent them
        has the whole request and may send it again."""
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
        """These and no others wait in the queue: the rest has left it without our doing."""
        for tracked in self._requests.waiting():
            if tracked.entry_id not in entry_ids:
                self._requests.drop(tracked)

    def hand_back(self, models: Collection[str]) -> None:
        """Waiting requests of these models go to the unplaced ones."""
        for tracked in self._requests.waiting():
            if tracked.request.model in models:
                self._requests.outbox.add(Update.UNPLACE, tracked.entry_id)
                self._requests.drop(tracked)
                self.wake()

    # --- admission --------------------------------------------------------------------------

    async def turn(self, epoch: int) -> None:
        """Tell Redis what happened, then admit and submit what starts at once.

        Raises QueueUnavailableError, LeaseLostError; nothing is lost then.
        """
        await self._requests.outbox.flush(self._queue, self._device, epoch)
        if self.paused or not self._requests.has_waiting:
            return
        plan, admitting = self._requests.plan(self._state.now_s(), self._views.read())
        for model, tokens in plan.lacking.items():
            self._reclaimer.reclaim_tokens(tokens, model)
        for model in plan.preempt:
            self._make_way(model)
        if admitting:
            await self._admit(admitting, epoch)

    def _make_way(self, model: str) -> None:
        """A suspect waits: the model's engine hands back what it runs, which goes on afterwards."""
        hosted = self._state.models.active(model)
        runs = self._requests.on_engine(hosted.engine_id) if hosted else []
        asked = [run for run in runs if run.state is RequestState.RUNNING and not run.makes_way]
        for run in asked:
            run.makes_way = True
        if hosted and asked:
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
        """Redis may have admitted it all the same: then it has left its queue, where a replay or a
        cancellation would look for it."""
        self._requests.outbox.add(Update.REQUEUE, tracked.id)
        if tracked.cancelled:
            self._requests.outbox.add(Update.FORGET, tracked.id, tracked.request)
        if tracked.cancelled or tracked.newer is not None:
            self._requests.drop(tracked)
        else:
            self._requests.wait(tracked)

    def _submit(self, model: str, admitted: list[TrackedRequest]) -> None:
        """To the model's engine, if it is still there after the wait for Redis."""
        hosted = self._state.models.active(model)
        started = []
        for tracked in admitted:
            if tracked.cancelled:
                self._requests.finish(tracked)
            elif hosted is None:
                self._requests.outbox.add(Update.REQUEUE, tracked.id)
                self._requests.drop(tracked)
            else:
                self._note_start(tracked, hosted.engine_id)
                started.append(tracked)
        if hosted is not None and started:
            self._engines.send(hosted.engine_id, Submit([each.request for each in started]))
        for tracked in started:
            self._choose_attempt(tracked)

    def _choose_attempt(self, started: TrackedRequest) -> None:
        """Between it and an entry that was read while it was being admitted."""
        if started.newer is None:
            return
        if started.newer.request.attempt > started.request.attempt:
            self._stop(started)
        else:
            started.newer = None
            self._requests.outbox.add(Update.REGISTER, started.id, started.request)

    def _note_start(self, tracked: TrackedRequest, engine_id: str) -> None:
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
        """Forward what an engine produced. Output of attempts that do not run here is dropped."""
        batch = OutputBatch()
        for chunk in output.chunks:
            if run := self._running(engine_id, chunk.request_id, chunk.attempt):
                self._take_chunk(run, chunk, batch)
        for failure in output.failures:
            if run := self._running(engine_id, failure.request_id, failure.attempt):
                self._take_failure(run, failure, batch)
        self._tokens.send(batch)

    def moved(self, engine_id: str, requests: Sequence[Request]) -> None:
        """The engine has stopped these; they go where their model is placed now, and KV for another
        machine goes ahead."""
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
                self._go_on(request)
        if hosted and leaving:
            self._send_kv(leaving, hosted.kv_target, self._go_on)

    def _go_on(self, request: Request) -> None:
        self._requests.go_on(request, self._now_unix_s())
        self.wake()

    def engine_lost(self, engine_id: str, why: str, by_request: bool = True) -> bool:
        """Every request on this engine fails; its frontend may send it again, unless it is to
        blame (see `RequestTable`). Whether one is. `by_request`: one of them may be."""
        batch, runs = OutputBatch(), self._requests.on_engine(engine_id)
        guilty = by_request and len(runs) == 1 and runs[0].is_on_trial
        for run in runs:
            if guilty:
                self._convict(run, why, batch)
                continue
            text = f"the engine process that served {run.request.model} died: {why}"
            failure = retryable(run.request, "engine_died", text)
            if by_request:
                changes = {"blame": "suspect", "output_tokens": run.produced}
                failure = msgspec.structs.replace(failure, **changes)
            self._take_failure(run, failure, batch)
        self._tokens.send(batch)
        return guilty

    def _convict(self, run: TrackedRequest, why: str, batch: OutputBatch) -> None:
        """It ends for good, and so does a newer attempt that waits for its end."""
        text = f"this request killed two engines; the last one: {why}"
        log.error("%s ends: %s", run.id, text)
        failure = Failure(run.id, run.request.attempt, "request_killed_engines", text)
        if (newer := run.newer) is not None:
            run.newer = None
            self._requests.outbox.add(Update.FORGET, run.id, newer.request)
            again = msgspec.structs.replace(failure, attempt=newer.request.attempt)
            batch.failure(newer.request, again)
        self._take_failure(run, failure, batch)

    def end_all(self, why: str) -> None:
        """This agent ends: what still runs fails, and may be sent again."""
        batch = OutputBatch()
        for run in self._requests.on_engines():
            self._take_failure(run, retryable(run.request, "agent_stopped", why), batch)
        self._tokens.send(batch)

    def _running(self, engine_id: str, request_id: str, attempt: int) -> TrackedRequest | None:
        """This attempt, if it runs on this engine."""
        run = self._requests.running(request_id)
        here = run is not None and run.engine_id == engine_id and run.request.attempt == attempt
        return run if here else None

    def _take_chunk(self, run: TrackedRequest, chunk: Chunk, batch: OutputBatch) -> None:
        totals = self._state.models.totals(run.request.model)
        totals.output_tokens += len(chunk.token_ids)
        was_on_trial, run.produced = run.is_on_trial, chunk.first_index + len(chunk.token_ids)
        shows = run.state is RequestState.RUNNING
        if shows and not run.prefilled:
            started = Started(run.id, run.request.attempt, self._device, run.started_unix_s)
            batch.started(run.request, started)
        if not run.prefilled or was_on_trial:
            run.prefilled = True
            self.wake()
        if shows:
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
        """Their frontend asks to stop these. Ids that are not here are ignored: a cancellation
        goes to all agents."""
        batch = OutputBatch()
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is None:
                continue
            if not tracked.is_on_engine:
                attempt = tracked.request.attempt
                batch.chunk(tracked.request, Chunk(request_id, attempt, 0, [], "cancelled"))
            self._withdraw(tracked)
        self._tokens.send(batch)
        self.wake()

    def _withdraw(self, tracked: TrackedRequest) -> None:
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
        """Its process has ended: nobody waits for its requests, those included that the queue has
        not shown yet."""
        self._gone.append(frontend_id)
        for tracked in self._requests.of_frontend(frontend_id):
            self._withdraw(tracked)
            if tracked.is_on_engine:
                tracked.state = RequestState.ENDING
        self.wake()

    def frontend_died(self, frontend_id: str) -> None:
        """Its requests are stopped; those that wait are dropped. It is told so for each: where it
        was suspended for a while, it would wait for their output."""
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
        """Its output is dropped from now on."""
        if run.state is RequestState.LEAVING:
            self._ended(run)
            return
        run.state = RequestState.ENDING
        self._engines.send(run.engine_id, Cancel([run.id]))
