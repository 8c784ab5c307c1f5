"""Sends requests to the shared queue, receives their output, and retries or cancels them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import zmq
import zmq.asyncio

from prism import clock
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import QueueUnavailableError, UnknownModelError
from prism.frontend.dispatch.agent_links import AgentLinks
from prism.frontend.dispatch.enqueuer import Enqueuer
from prism.frontend.dispatch.heartbeat import Heartbeat
from prism.frontend.dispatch.lost_requests import LostRequestWatch
from prism.frontend.dispatch.queue_retry import retry_until_available
from prism.frontend.dispatch.receiving import receive
from prism.frontend.dispatch.refusals import RefusalWatch
from prism.frontend.dispatch.request_log import ChunkOutcome, OpenRequest, RequestLog
from prism.frontend.http.error_bodies import OverloadedError, SheddingError, UnavailableError
from prism.frontend.live_config import LiveConfig
from prism.frontend.metrics.request_metrics import Metrics
from prism.frontend.metrics.siblings import Siblings
from prism.messages.external import ServerLoad
from prism.messages.requests import EngineOutput, Failure, ToFrontend
from prism.queueing.request_queue import RequestQueue
from prism.tasks import cancel_all
from prism.transport import Channel

log = logging.getLogger(__name__)

_PROGRESS_CHECK_S = 1.0
_RESTORED_AT_ONCE = 16
_UNKNOWN_MAX = 1024
_CLOSE_TIMEOUT_S = 2.0
_LINGER_MS = 200


class Dispatcher:
    """Owner of the log of a frontend's open requests. For one event loop.

    Every end of a request (last chunk, error, disconnected client) must reach `close_requests` or
    `cancel`.
    """

    def __init__(
        self,
        live: LiveConfig,
        frontend_id: str,
        queue: RequestQueue,
        metrics: Metrics,
        external_loads: Callable[[], dict[str, ServerLoad]] = dict,
    ) -> None:
        config = live.config
        self.frontend_id = frontend_id
        self.log = RequestLog(*_bounds(config))
        self._enqueuer = Enqueuer(queue, self.log)
        self._refusals = RefusalWatch(self.log, queue, config.frontend.refused_timeout_s)
        self._lost = LostRequestWatch(self.log, queue, self._resend)
        self._heartbeat = Heartbeat(
            live, frontend_id, queue, self.log, self._restore, external_loads=external_loads
        )
        self._queue = queue
        self._live = live
        self._slo_ttft_s = {model.name: model.slo_ttft_s for model in config.models}
        self._metrics = metrics
        self._context = zmq.asyncio.Context()
        key = config.cluster_key
        self._inbox: Channel[ToFrontend] = Channel(self._context, zmq.PULL, ToFrontend, key, hwm=0)
        self.siblings = Siblings(
            self._context, config, frontend_id, lambda names: metrics.text(frontend_id, names)
        )
        self._agents = AgentLinks(self._context)
        self._loops: list[asyncio.Task[None]] = []
        # Set when a bug has ended one of the loops: nothing is served after that.
        self.broken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown: OrderedDict[str, None] = OrderedDict()

    async def start(self) -> None:
        config = self._live.config
        for endpoint in config.own_frontend_endpoints(self.frontend_id):
            self._inbox.bind(endpoint)
        self._agents.connect(config)
        watches = (self._refusals.run(), self._lost.run(), self._watch_progress())
        beats = (self._heartbeat.run(), self._heartbeat.report_arrivals())
        loops = (receive(self._inbox, self._deliver), *beats, *watches)
        self._loops = [self._spawn(loop) for loop in loops]

    async def close(self) -> None:
        """Cancels the open requests and waits up to _CLOSE_TIMEOUT_S for their cancellations."""
        self.cancel([entry.request.id for entry in self.log])
        while pending := self._tasks.difference(self._loops):
            _, late = await asyncio.wait(pending, timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
        await cancel_all(self._loops)
        self._inbox.close()
        self._context.destroy(linger=_LINGER_MS)

    def apply_config(self) -> None:
        """Applies a new configuration and announces it to the scheduler. Open requests continue."""
        config = self._live.config
        self.log.resize(*_bounds(config))
        self._refusals.after_s = config.frontend.refused_timeout_s
        self._slo_ttft_s |= {model.name: model.slo_ttft_s for model in config.models}
        self._agents.connect(config)
        self._spawn(self._heartbeat.announce())

    # --- requests ---------------------------------------------------------------------------

    async def submit(self, opened: Sequence[OpenRequest], *, retried: bool = False) -> None:
        """Enqueues all entries or none. Raises OverloadedError, UnknownModelError for a model that
        was removed meanwhile, UnavailableError for a model that is refused for overload, or
        QueueUnavailableError if Redis was unavailable for `frontend.queue_timeout`.

        Args:
            retried: The client has sent the request before. If it is rejected again, it does not
                count as an arrival again: a model would be worth more for being refused.
        """
        model = opened[0].request.model
        if not self._is_served(model):
            raise UnknownModelError(f"the model {model!r} was removed")
        why = self._refusals.overload.get(model)
        if not (why and retried):
            self.log.count_arrivals(opened)
        if why:
            raise UnavailableError(why, "model_unavailable")
        if self._live.config.frontend.shed and (
            late := self.log.late(model, clock.unix_s(), self._slo_ttft_s[model])
        ):
            raise SheddingError(
                f"{late} requests for {model} have missed their TTFT SLO; try again later"
            )
        self.log.add(list(opened))
        try:
            await self._enqueue(opened)
        except BaseException:
            self.cancel([entry.request.id for entry in opened])
            raise

    def _is_served(self, model: str) -> bool:
        """Returns whether the model accepts requests. A removed model does until no request for it
        is open: then a heartbeat tells the scheduler, which evicts it."""
        served = (each.name for each in self._live.config.models)
        return model in served or model in self.log.models()

    def close_requests(self, request_ids: Sequence[str]) -> None:
        """Closes requests that the engine has ended."""
        for request_id in request_ids:
            self.log.close(request_id)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Closes requests and removes them from the queue and the engines."""
        closed = [i for i in request_ids if self.log.close(i) is not None]
        if closed:
            self._spawn(self._withdraw(closed))

    def fail_all(self, code: str, message: str) -> None:
        """Fails every open request with this error (the drain's time is over)."""
        for entry in self.log:
            entry.fail(code, message)

    async def _withdraw(self, request_ids: list[str]) -> None:
        # Removed from the queue first: otherwise an agent could admit a request in between.
        try:
            await self._queue.forget(request_ids)
        except QueueUnavailableError as error:
            log.warning("cannot remove %d requests from the queue: %s", len(request_ids), error)
        self._agents.cancel(request_ids)

    # --- output -----------------------------------------------------------------------------

    def _deliver(self, message: ToFrontend) -> None:
        if isinstance(message, EngineOutput):
            self._take(message)
        else:
            self.siblings.take(message)

    def _take(self, output: EngineOutput) -> None:
        unknown = []
        for started in output.started:
            if (entry := self.log.take_start(started, output.agent)) is not None:
                self._metrics.observe_queue_time(entry.request, started.unix_s)
        for chunk in output.chunks:
            outcome = self.log.take_chunk(chunk, output.agent)
            if outcome is ChunkOutcome.NOTHING:
                continue
            if outcome is ChunkOutcome.UNKNOWN and self._is_unknown_and_new(chunk.request_id):
                unknown.append(chunk.request_id)
            elif outcome is not ChunkOutcome.UNKNOWN:
                self._recover(_lost(chunk.request_id, chunk.attempt), outcome)
        for failure in output.failures:
            self._recover(failure, self.log.take_failure(failure, output.agent))
        if unknown:
            self._agents.cancel(unknown)

    def _is_unknown_and_new(self, request_id: str) -> bool:
        """Returns whether this is the first output for a request that is not open here. The
        frontend was restarted, or a cancellation was lost; such a request is cancelled once."""
        if request_id in self._unknown:
            return False
        self._unknown[request_id] = None
        if len(self._unknown) > _UNKNOWN_MAX:
            self._unknown.popitem(last=False)
        return True

    def _recover(self, failure: Failure, outcome: ChunkOutcome) -> None:
        entry = self.log.get(failure.request_id)
        if entry is None or outcome is ChunkOutcome.NOTHING:
            return
        if outcome is ChunkOutcome.RETRY:
            self._metrics.retries.labels(entry.request.model).inc()
            log.info("retrying %s: %s", failure.request_id, failure.code)
            entry.start_next_attempt()
            self._spawn(self._requeue(entry))
        else:
            entry.fail(failure.code, failure.message)

    def _resend(self, entry: OpenRequest) -> None:
        """Enqueues the same attempt again, which changes nothing if an agent has it after all."""
        if not entry.note_resend():
            entry.fail("output_lost", "the request left the queue, and its output was lost")
            return
        self._metrics.retries.labels(entry.request.model).inc()
        log.warning("resending %s: it left the queue without a result", entry.request.id)
        self._spawn(self._requeue(entry))

    async def _requeue(self, entry: OpenRequest) -> None:
        try:
            await self._enqueue([entry])
        except QueueUnavailableError as error:
            log.warning("%s: %s", entry.request.id, error)
            entry.fail("queue_unavailable", "the request queue (Redis) cannot be reached")
        except OverloadedError as error:
            entry.fail(error.code, str(error))

    async def _enqueue(self, entries: Sequence[OpenRequest]) -> None:
        """Retries until Redis takes the entries or they are closed. Raises QueueUnavailableError
        after `frontend.queue_timeout`."""
        timeout_s = self._live.config.frontend.queue_timeout_s
        await retry_until_available(lambda: self._enqueuer.put(entries), timeout_s)

    async def _watch_progress(self) -> None:
        """Fails requests without progress. Polled, since a timer for each token would cost more
        than the token."""
        while True:
            timeout_s = self._live.config.frontend.progress_timeout_s
            await asyncio.sleep(min(_PROGRESS_CHECK_S, timeout_s / 4))
            now_s = time.monotonic()
            for entry in self.log.unended():
                if now_s - entry.progress_s > timeout_s:
                    text = f"no token for {timeout_s:g} s; the request was cancelled"
                    entry.fail("timeout", text)

    async def _restore(self) -> None:
        """Enqueues the open requests. If Redis has not lost its data, this changes nothing: it is
        idempotent by id and attempt, and agents know their running and ended requests."""
        entries = self.log.unended()
        # Several at a time, since the next heartbeat waits for all of them.
        for start in range(0, len(entries), _RESTORED_AT_ONCE):
            await self._put_again(entries[start : start + _RESTORED_AT_ONCE])

    async def _put_again(self, entries: Sequence[OpenRequest]) -> None:
        """Enqueues the entries. Fails those with images if Redis does not have room for these."""
        try:
            await self._enqueuer.put(entries)
        except OverloadedError as error:
            for entry in entries:
                if entry.request.images:
                    entry.fail(error.code, str(error))
            await self._enqueuer.put([each for each in entries if not each.request.images])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)
            if task in self._loops:
                self.broken.set()


def _bounds(config: ClusterConfig) -> tuple[int, int]:
    """Returns the limit on open requests and the number of models. Each frontend has its share of
    the limit, which holds for the cluster."""
    return -(-config.frontend.max_open_requests // config.frontends_total), len(config.models)


def _lost(request_id: str, attempt: int) -> Failure:
    message = "output was lost between the engine and the frontend"
    return Failure(request_id, attempt, "output_lost", message, retryable=True)
