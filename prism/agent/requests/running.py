"""Requests on engines, from their submission to their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from prism import clock
from prism.agent.network.sockets import EngineLink, OutputBatch, TokenSender, retryable
from prism.agent.state.device_state import DeviceState
from prism.agent.state.request_table import RequestState, TrackedRequest, Update
from prism.messages.engine import Export, StartJob, Submit
from prism.messages.image_tensors import Tensors
from prism.messages.requests import Cancel, Chunk, EngineOutput, Failure, Request, Started
from prism.policies.data import request_kv_tokens
from prism.scheduler.traffic import bucket

log = logging.getLogger(__name__)

PREFILL_RETRY_S = 0.05
"""Pause after a prefill that could not continue."""
EMPTY: Mapping[str, Tensors] = MappingProxyType({})


class RunningRequests:
    """Requests on engines: orders to the engines, and output to the frontends.

    Args:
        device: the device's name.
        headroom_tokens: as in the scheduler's `Limits`.
        send_kv: see `KvSender.begin`.
        now_unix_s: the cluster's clock.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        device: str,
        engines: EngineLink,
        tokens: TokenSender,
        headroom_tokens: int,
        send_kv: Callable[[Sequence[Request], str, Callable[[Request], None]], None],
        now_unix_s: Callable[[], float] = clock.unix_s,
    ) -> None:
        self._state = state
        self._requests = state.requests
        self._device = device
        self._engines = engines
        self._tokens = tokens
        self._headroom_tokens, self._send_kv = headroom_tokens, send_kv
        self._now_unix_s = now_unix_s

    # --- orders -----------------------------------------------------------------------------

    def submit(
        self, model: str, admitted: list[TrackedRequest], images: Mapping[str, Tensors] = EMPTY
    ) -> None:
        """Submits requests to the model's engine, if it is still there after the call to Redis.
        `images`: those of the requests, by digest."""
        hosted = self._state.models.active(model)
        started = []
        for tracked in admitted:
            if tracked.cancelled:
                self._requests.finish(tracked)
            elif any(image.digest not in images for image in tracked.request.images):
                self._fail_imageless(tracked)
            elif hosted is None:
                self._requests.outbox.add(Update.REQUEUE, tracked.id)
                self._requests.drop(tracked)
            else:
                self._start(tracked, hosted.engine_id)
                started.append(tracked)
        if hosted is not None and started:
            order = Submit([each.request for each in started], dict(images))
            self._engines.send(hosted.engine_id, order)
            if hosted.prefills:
                self._prefill(hosted.engine_id)
        for tracked in started:
            self._choose_attempt(tracked)

    def _fail_imageless(self, tracked: TrackedRequest) -> None:
        """Fails a request whose images are not in Redis any more. Its frontend has them."""
        batch = OutputBatch()
        text = "the queue does not have the request's images any more"
        batch.failure(tracked.request, retryable(tracked.request, "images_lost", text))
        self._requests.finish(tracked)
        self._tokens.send(batch)

    def _choose_attempt(self, started: TrackedRequest) -> None:
        """Chooses between a request and an entry of it that was read during its admission."""
        if started.newer is None:
            return
        if started.newer.request.attempt > started.request.attempt:
            self.stop(started)
        else:
            started.newer = None
            self._requests.outbox.add(Update.REGISTER, started.id, started.request)

    def _start(self, tracked: TrackedRequest, engine_id: str) -> None:
        request, engine = tracked.request, self._state.pool.get(engine_id)
        activated = engine.activated if engine else None
        headroom = min(request.sampling.max_tokens, self._headroom_tokens)
        need_tokens = request.known_tokens + headroom
        if activated:
            need_tokens = request_kv_tokens(activated, need_tokens)
        self._requests.start(tracked, engine_id, need_tokens)
        totals = self._state.models.totals(request.model)
        totals.prompt_tokens += len(request.prompt_ids)
        totals.last_request_unix_s = tracked.started_unix_s = self._now_unix_s()

    def preempt(self, model: str) -> None:
        """Orders the model's engine to export its requests, which resume after a suspect."""
        if (hosted := self._state.models.active(model)) is not None:
            self._export(hosted.engine_id, self._requests.on_engine(hosted.engine_id))

    def _export(self, engine_id: str, runs: Sequence[TrackedRequest]) -> None:
        new = [run for run in runs if run.state is RequestState.RUNNING and not run.preempted]
        for run in new:
            run.preempted = True
        if new:
            self._engines.send(engine_id, Export())

    def cancel(self, run: TrackedRequest) -> None:
        """Orders the engine to stop a request, or ends one that is between two engines."""
        if run.is_on_engine:
            self._engines.send(run.engine_id, Cancel([run.id]))
        else:
            self._ended(run)

    def stop(self, run: TrackedRequest) -> None:
        """Cancels a request, whose output is dropped from now on."""
        if run.is_on_engine:
            run.state = RequestState.ENDING
        self.cancel(run)

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

    def prefill_ended(self, engine_id: str, *, lacks_memory: bool) -> None:
        """Lets the prefilled request of an engine leave, or tries again: memory or a grammar may
        have been missing."""
        if lacks_memory:
            loop = asyncio.get_running_loop()
            loop.call_later(PREFILL_RETRY_S, self._prefill, engine_id)
        else:
            self._export(engine_id, self._requests.on_engine(engine_id))

    def _prefill(self, engine_id: str) -> None:
        """Orders an engine that only prefills to start."""
        runs = self._requests.on_engine(engine_id)
        if ids := [run.id for run in runs if not run.prefilled]:
            self._engines.send(engine_id, StartJob("prefill", ids))

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
        self._requests.wake()

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
        run = self._requests.running(request_id, attempt)
        return run if run is not None and run.engine_id == engine_id else None

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
            self._requests.changes += was_on_trial
            self._requests.wake()
        if is_forwarded:
            batch.chunk(run.request, chunk)
        if chunk.finish_reason is not None:
            if chunk.finish_reason == "cancelled":
                totals.cancelled += 1
            else:
                totals.finished += 1
                due_unix_s = run.request.e2e_deadline_unix_s(run.produced)
                totals.met += self._now_unix_s() <= due_unix_s
                totals.output_lengths[bucket(run.produced)] += 1
            self._ended(run)

    def _take_failure(self, run: TrackedRequest, failure: Failure, batch: OutputBatch) -> None:
        self._state.models.totals(run.request.model).failed += 1
        if run.state is not RequestState.ENDING:
            batch.failure(run.request, failure)
        self._ended(run)

    def _ended(self, run: TrackedRequest) -> None:
        self._requests.finish(run)
        self._state.models.totals(run.request.model).last_request_unix_s = self._now_unix_s()
        self._requests.wake()
