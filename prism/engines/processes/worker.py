"""Main loop of an engine process: takes the agent's messages, sends tokens and status.

The loop is the same for all engines; `EngineCore` does everything about a model. The process talks
to its agent through one DEALER socket (identity = engine id, one frame per message) and runs in one
thread. It waits in poll() while there is nothing to compute.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import zmq

from kvcached.errors import LedgerCorruptError
from kvcached.handover.offer_server import malformed_total as malformed_fetches
from prism.engines.core import EngineContext, EngineCore, StepOutput, activation_failed
from prism.engines.processes.jobs import Jobs
from prism.errors import ActivationError, RankLostError, RequestsFailedError
from prism.messages.engine import (
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    EndRun,
    EngineHello,
    Export,
    Exported,
    PauseRequests,
    ResumeRequests,
    SetLimit,
    Shutdown,
    StartJob,
    Submit,
    ToEngine,
)
from prism.messages.requests import Cancel, EngineOutput, Failure, Request
from prism.transport import ENGINE_MESSAGE_BYTES_MAX, BlockingChannel, malformed_total

STATUS_MIN_S = 0.020
STATUS_MAX_S = 1.0
STALLED_RETRY_S = 0.005
STALLED_STEP_S = 0.002
LINGER_MS = 1000
MESSAGES_PER_ITERATION = 64

log = logging.getLogger("prism.engine")


class AgentChannel:
    """The engine's end of the socket to its agent.

    A send blocks while the agent reads slower than its engines write.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel: BlockingChannel[ToEngine] = BlockingChannel(
            self._context,
            zmq.DEALER,
            ToEngine,
            identity=context.engine_id.encode(),
            linger=LINGER_MS,
            maxmsgsize=ENGINE_MESSAGE_BYTES_MAX,
        )
        self._channel.connect(context.config.agent_engines_endpoint(context.device))
        self._poller = zmq.Poller()
        self._poller.register(self._channel.socket, zmq.POLLIN)
        self.send = self._channel.send

    def wake_on_signals(self) -> None:
        """Makes a signal end `receive` early. Its handler runs before `receive` returns."""
        self._wake, writer = socket.socketpair()
        self._wake.setblocking(False)
        writer.setblocking(False)
        self._wake_writer = writer
        signal.set_wakeup_fd(writer.fileno())
        self._poller.register(self._wake, zmq.POLLIN)

    def wake_on(self, descriptor: int) -> None:
        """Makes `receive` end early while this descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Returns the messages that have arrived, after waiting up to `timeout_s` for the first."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
        return self._channel.receive(MESSAGES_PER_ITERATION)

    def close(self) -> None:
        self._channel.close()
        self._context.term()


class Worker:
    """Carries out the agent's orders and steps the core.

    `clock` returns monotonic seconds. Not thread-safe; `stop` may be called from a signal handler.
    """

    def __init__(
        self,
        core: EngineCore,
        link: AgentChannel,
        engine_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._link = link
        self._engine_id = engine_id
        self._clock = clock
        self._model: str | None = None
        self._activating: str | None = None
        self._deactivating: tuple[str, float] | None = None  # model, start in seconds of `clock`
        self._open: dict[str, int] = {}
        self._paused: set[str] = set()  # some may have ended since the last pause
        self._jobs = Jobs(core, link.send)
        self._controlled = False  # True: only jobs are stepped
        self._busy = False
        self._stalled = False
        self._stopping = False
        self._changed = False
        self._status_at_s = float("-inf")

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> int:
        """Serves until Shutdown or `stop`; returns the exit code 0.

        An exception of the core fails every open request and is raised again. The state of the core
        is then unknown, so the process must end and be replaced.
        """
        self._link.send(EngineHello(engine_id=self._engine_id, pid=os.getpid()))
        try:
            while not self._stopping:
                self._iterate()
        except Exception as error:
            self._report_crash(error)
            raise
        self._core.close()
        return 0

    def _iterate(self) -> None:
        self._report_status()
        for message in self._link.receive(self._poll_timeout_s()):
            self._handle(message)
        self._changed |= self._core.answer_requests()
        self._finish_deactivation()
        if self._open or self._busy:
            self._step()

    def _poll_timeout_s(self) -> float:
        """Returns how long to wait for messages.

        A core that holds requests but has no memory for them is stepped again soon, since memory
        that other engines free is not announced. Such a core may report busy; `_stalled` detects
        it by a last step that took no time and produced no output.
        """
        if self._busy and not self._stalled:
            return 0.0
        until_status_s = self._status_due_s() - self._clock()
        soon = self._may_step() or self._deactivating
        return min(STALLED_RETRY_S, until_status_s) if soon else until_status_s

    def _may_step(self) -> bool:
        """Returns whether a request may get a token without a further message."""
        if self._controlled:
            return self._jobs.present is not None
        return bool(self._open.keys() - self._paused)

    def _step(self) -> None:
        if self._controlled:
            self._jobs.prepare()
        started_s = self._clock()
        output = self._core.step()
        seconds = self._clock() - started_s
        self._busy = output.busy
        silent = not (output.chunks or output.failures)
        self._stalled = silent and seconds < STALLED_STEP_S
        self._changed = True
        self._send_output(output)
        if self._controlled:
            self._jobs.stepped(output, seconds, stalled=self._stalled)

    def _send_output(self, output: StepOutput) -> None:
        if not (output.chunks or output.failures):
            return
        for chunk in output.chunks:
            if chunk.finish_reason is not None:
                self._open.pop(chunk.request_id, None)
        for failure in output.failures:
            self._open.pop(failure.request_id, None)
        self._link.send(EngineOutput(chunks=output.chunks, failures=output.failures))

    # --- status ----------------------------------------------------------------------------

    def _status_due_s(self) -> float:
        return self._status_at_s + (STATUS_MIN_S if self._changed else STATUS_MAX_S)

    def _report_status(self) -> None:
        now_s = self._clock()
        if now_s < self._status_due_s():
            return
        self._status_at_s = now_s
        self._changed = False
        dropped = malformed_total() + malformed_fetches()
        self._link.send(msgspec.structs.replace(self._core.status(), malformed_total=dropped))

    # --- the agent's orders ----------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        self._changed = True
        match message:
            case Submit(requests=requests, images=images):
                self._submit([request.with_tensors(images) for request in requests])
            case Cancel(request_ids=ids):
                self._core.cancel([i for i in ids if i in self._open])
            case PauseRequests(request_ids=ids):
                self._core.pause(ids)
                self._paused = self._open.keys() & (self._paused | set(ids))
            case ResumeRequests(request_ids=ids):
                self._core.resume(ids)
                self._paused.difference_update(ids)
            case StartJob():
                self._jobs.start(message, self._open)
                self._stalled = False
            case EndRun():
                self._jobs.end_run()
            case ActivateEngine():
                self._activate(message)
            case Deactivate():
                self._begin_deactivation()
            case Export(targets=targets):
                self._export(targets)
            case SetLimit(kv_limit_bytes=limit_bytes):
                self._core.set_limit(limit_bytes)
            case Shutdown():
                self._stopping = True

    def _submit(self, requests: list[Request]) -> None:
        misplaced = [r for r in requests if r.model != self._model]
        if misplaced:
            text = f"this engine serves {self._model or 'no model'} now"
            self._fail({r.id: r.attempt for r in misplaced}, "model_not_active", text)
        mine = [r for r in requests if r.model == self._model and r.id not in self._open]
        self._open.update((r.id, r.attempt) for r in mine)
        self._paused.difference_update(r.id for r in mine)
        if mine:
            self._core.submit(mine)
            if self._controlled:
                self._core.pause([r.id for r in mine])

    def _export(self, targets: Sequence[str] | None) -> None:
        requests = self._core.export(targets)
        for request in requests:
            self._open.pop(request.id, None)
        self._jobs.forget([request.id for request in requests])
        self._link.send(Exported(requests))

    def _activate(self, order: ActivateEngine) -> None:
        name = order.model.name
        if self._model is not None:
            text = f"{self._model} is active on {self._engine_id}: deactivate it first"
            self._link.send(ActivationFailed(model=name, message=text))
            return
        self._activating = name
        try:
            activated = self._core.activate(order)
            self._model, self._controlled = name, order.controlled
            log.info("activated %s", name)
            self._link.send(activated)
        except ActivationError as error:
            log.warning("activation of %s failed: %s", name, error)
            self._link.send(activation_failed(name, error))
        self._activating = None

    def _begin_deactivation(self) -> None:
        """Fails open requests and starts the deactivation. It is answered also if no model is
        active, so that an agent with outdated state recovers."""
        model, self._model = self._model or "", None
        self._fail(self._open, "model_evicted", f"{model} left this engine while serving")
        self._open = {}
        self._jobs.clear()
        self._busy = False
        self._deactivating = self._deactivating or (model, self._clock())
        self._finish_deactivation()

    def _finish_deactivation(self) -> None:
        """Deactivates once exported KV has been fetched or its offer has expired."""
        if self._deactivating is None or self._core.handing_over():
            return
        (model, started_s), self._deactivating = self._deactivating, None
        if model:
            self._core.deactivate()
            # The last counters of this model include the unmaps of the deactivation itself.
            self._link.send(msgspec.structs.replace(self._core.status(), model=model))
        seconds = self._clock() - started_s
        log.info("deactivated %s in %.3f s", model or "nothing", seconds)
        self._link.send(Deactivated(model=model, seconds=seconds))

    # --- failures --------------------------------------------------------------------------

    def _fail(
        self,
        attempts: dict[str, int],
        code: str,
        message: str,
        blame: Literal["", "suspect", "other"] = "",
    ) -> None:
        failures = [
            Failure(i, n, code, message, retryable=True, blame=blame) for i, n in attempts.items()
        ]
        if failures:
            self._link.send(EngineOutput(failures=failures))

    def _report_crash(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        # Logged first, since the agent kills this process once it has the failures.
        log.error("engine failed: %s", text, exc_info=error)
        is_known = isinstance(error, RequestsFailedError | LedgerCorruptError)
        blame: Literal["suspect", "other"] = "other" if is_known else "suspect"
        self._fail(self._open, "engine_error", text, blame)
        # A lost rank says nothing about the model: the agent sees the exit and uses another engine.
        if self._activating is not None and not isinstance(error, RankLostError):
            self._link.send(ActivationFailed(model=self._activating, message=text))


def run_engine(context: EngineContext, create: Callable[[EngineContext], EngineCore]) -> int:
    """Runs the loop of an engine process until its end. Returns the exit code.

    SIGTERM ends it like Shutdown. Raises the core's errors, after failing its requests.
    """
    link = AgentChannel(context)
    link.wake_on_signals()
    try:
        core = create(context)
        link.wake_on(core.fileno())
        worker = Worker(core, link, context.engine_id)
        signal.signal(signal.SIGTERM, lambda _signum, _frame: worker.stop())
        return worker.run()
    finally:
        link.close()
