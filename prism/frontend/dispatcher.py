"""Sends requests to the shared queue, receives their output, and retries or cancels them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prism.config import ClusterConfig
from prism.errors import QueueUnavailableError
from prism.frontend.metrics import Metrics
from prism.frontend.refusals import RefusalWatch
from prism.frontend.request_log import OpenRequest, RequestLog, Verdict
from prism.messages import Cancel, EngineOutput, Failure
from prism.queueing.requests import RequestQueue

log = logging.getLogger(__name__)

_HEARTBEAT_TTL_S = 6.0
_HEARTBEAT_S = 2.0
_REQUEUE_DELAYS_S = (0.0, 0.2, 1.0, 3.0)
_STRANGERS_MAX = 1024
_CANCEL_BATCH_MAX = 1024
_CLOSE_TIMEOUT_S = 2.0
_LINGER_MS = 200


class Dispatcher:
    """One per frontend process; every method is called from its event loop.

    `broken` is set when a bug has ended one of its loops: nothing is served from then on.

    The log of open requests lives here. Whatever ends a request (its last chunk, an error, a
    client that goes away) must reach `close_requests` or `cancel`.
    """

    def __init__(
        self, config: ClusterConfig, frontend_id: str, queue: RequestQueue, metrics: Metrics
    ) -> None:
        self.frontend_id = frontend_id
        self.reply_to = config.frontend_endpoint(frontend_id)
        self.log = RequestLog(config.frontend.max_open_requests)
        self._refusals = RefusalWatch(self.log, queue, config.frontend.refused_timeout_s)
        self._queue = queue
        self._metrics = metrics
        self._cancel_endpoints = [config.agent_cancel_endpoint(d.name) for d in config.devices]
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._cancels: list[zmq.asyncio.Socket] = []
        self._loops: list[asyncio.Task[None]] = []
        self.broken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: OrderedDict[str, None] = OrderedDict()
        self._decoder = msgspec.msgpack.Decoder(EngineOutput)

    async def start(self) -> None:
        self._inbox.set_hwm(0)
        self._inbox.bind(self.reply_to)
        for endpoint in self._cancel_endpoints:
            socket = self._context.socket(zmq.PUSH)
            socket.connect(endpoint)
            self._cancels.append(socket)
        loops = (self._receive(), self._beat(), self._refusals.run())
        self._loops = [self._spawn(loop) for loop in loops]

    async def close(self) -> None:
        """Cancels what is open and lets the cancellations go out (bounded)."""
        self.cancel([entry.request.id for entry in self.log])
        while errands := self._tasks.difference(self._loops):
            _, late = await asyncio.wait(errands, timeout=_CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._context.destroy(linger=_LINGER_MS)

    # --- requests ---------------------------------------------------------------------------

    async def submit(self, opened: Sequence[OpenRequest]) -> None:
        """Enqueue all of them, or none: raises OverloadedError or QueueUnavailableError."""
        self.log.add(list(opened))
        try:
            for entry in opened:
                await self._queue.enqueue(entry.request)
        except BaseException:
            self.cancel([entry.request.id for entry in opened])
            raise

    def close_requests(self, request_ids: Sequence[str]) -> None:
        """They ended by themselves: nothing is left to cancel."""
        for request_id in request_ids:
            self.log.close(request_id)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Nobody wants their output any more: take them out of the queue and the engines."""
        closed = [i for i in request_ids if self.log.close(i) is not None]
        if closed:
            self._spawn(self._withdraw(closed))

    def break_all(self, code: str, message: str) -> None:
        """End every open request with this error (the drain's time is over)."""
        for entry in self.log:
            entry.break_off(code, message)

    async def _withdraw(self, request_ids: list[str]) -> None:
        # First out of the queue, then out of the agents: in the other order an agent could
        # admit a request between the two.
        try:
            await self._queue.forget(request_ids)
        except QueueUnavailableError as error:
            log.warning("could not take %d requests out of the queue: %s", len(request_ids), error)
        self._send_cancel(request_ids)

    def _send_cancel(self, request_ids: list[str]) -> None:
        for start in range(0, len(request_ids), _CANCEL_BATCH_MAX):
            batch = request_ids[start : start + _CANCEL_BATCH_MAX]
            message = msgspec.msgpack.encode(Cancel(batch))
            for socket in self._cancels:
                self._spawn(self._push(socket, message))

    async def _push(self, socket: zmq.asyncio.Socket, message: bytes) -> None:
        try:
            await socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("an agent does not take cancellations now")

    # --- output -----------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            frame = await self._inbox.recv()
            try:
                output = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                log.error("dropped a message that is no EngineOutput: %s", error)
                continue
            self._take(output)

    def _take(self, output: EngineOutput) -> None:
        strangers = []
        for chunk in output.chunks:
            verdict = self.log.take_chunk(chunk)
            if verdict is Verdict.UNKNOWN and self._is_new_stranger(chunk.request_id):
                strangers.append(chunk.request_id)
            elif verdict in (Verdict.RETRY, Verdict.BREAK):
                self._recover(_lost(chunk.request_id, chunk.attempt), verdict)
        for failure in output.failures:
            self._recover(failure, self.log.take_failure(failure))
        if strangers:
            self._send_cancel(strangers)

    def _is_new_stranger(self, request_id: str) -> bool:
        """Output for a request that nobody has open here (this frontend was restarted, or a
        cancellation was lost): cancel it, once."""
        if request_id in self._strangers:
            return False
        self._strangers[request_id] = None
        if len(self._strangers) > _STRANGERS_MAX:
            self._strangers.popitem(last=False)
        return True

    def _recover(self, failure: Failure, verdict: Verdict) -> None:
        entry = self.log.get(failure.request_id)
        if entry is None or verdict is Verdict.NOTHING:
            return
        if verdict is Verdict.RETRY:
            self._metrics.retries.labels(entry.request.model).inc()
            log.info("%s is sent again: %s", failure.request_id, failure.code)
            entry.restart(entry.request.attempt + 1)
            self._spawn(self._requeue(entry))
        else:
            entry.break_off(failure.code, failure.message)

    async def _requeue(self, entry: OpenRequest) -> None:
        for delay_s in _REQUEUE_DELAYS_S:
            await asyncio.sleep(delay_s)
            if self.log.get(entry.request.id) is not entry:
                return
            try:
                await self._queue.enqueue(entry.request)
            except QueueUnavailableError as error:
                log.warning("%s: %s", entry.request.id, error)
            else:
                return
        entry.break_off("queue_unavailable", "the request queue (Redis) cannot be reached")

    # --- heartbeat --------------------------------------------------------------------------

    async def _beat(self) -> None:
        healthy = True
        while True:
            began_s = time.monotonic()
            try:
                await self._queue.beat(self.frontend_id, _HEARTBEAT_TTL_S)
                if not healthy:
                    await self._restore()
                healthy = True
            except QueueUnavailableError as error:
                log.log(logging.WARNING if healthy else logging.DEBUG, "%s", error)
                healthy = False
            await asyncio.sleep(max(0.1, _HEARTBEAT_S - (time.monotonic() - began_s)))

    async def _restore(self) -> None:
        """Redis is back, perhaps without its data: enqueue what is open and has no output yet.
        Where the data survived this changes nothing (idempotent by id and attempt)."""
        for entry in self.log:
            if not entry.received_tokens and self.log.get(entry.request.id) is entry:
                await self._queue.enqueue(entry.request)

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


def _lost(request_id: str, attempt: int) -> Failure:
    message = "output was lost between the engine and the frontend"
    return Failure(request_id, attempt, "output_lost", message, retryable=True)
