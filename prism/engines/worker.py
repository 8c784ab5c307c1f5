"""The loop of an engine process: messages of the agent in, tokens and status out.

Engine-neutral: everything about a model happens behind `EngineCore`. The process talks to its
agent through one DEALER socket (identity = engine id, one frame per message) and runs in one
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
from kvcached.handover.server import malformed_total as malformed_fetches
from prism.engines.core import EngineContext, EngineCore, StepOutput, activation_failed
from prism.errors import ActivationError, RankLostError, RequestsFailedError
from prism.messages.engine import (
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    EngineHello,
    Export,
    Exported,
    SetLimit,
    Shutdown,
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
MESSAGES_PER_TURN = 64

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
        """Let a signal end `receive` early. Its handler runs before `receive` returns."""
        self._wake, writer = socket.socketpair()
        self._wake.setblocking(False)
        writer.setblocking(False)
        self._wake_writer = writer
        signal.set_wakeup_fd(writer.fileno())
        self._poller.register(self._wake, zmq.POLLIN)

    def wake_on(self, descriptor: int) -> None:
        """Let this descriptor end `receive` early as long as it is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, patience_s: float) -> list[ToEngine]:
        """Messages that have arrived, after waiting up to `patience_s` for the first."""
        self._poller.poll(max(0, round(patience_s * 1000)))
        return self._channel.receive(MESSAGES_PER_TURN)

    def close(self) -> None:
        self._channel.close()
        self._context.term()


class Worker:
    """Obeys the agent and steps the core.

    `clock` gives monotonic seconds. Not thread-safe; `stop` may be called from a signal handler.
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
        self._leaving: tuple[str, float] | None = None
        self._open: dict[str, int] = {}
        self._busy = False
        self._stalled = False
        self._stopping = False
        self._changed = False
        self._status_at_s = float("-inf")

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> int:
        """Serve until Shutdown or `stop`; returns the exit code 0.

        An exception of the core fails every open request, then leaves this function: the state
        of the core is unknown, so the process must end and be replaced.
        """
        self._link.send(EngineHello(engine_id=self._engine_id, pid=os.getpid()))
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            self._report_crash(error)
            raise
        self._core.close()
        return 0

    def _turn(self) -> None:
        self._report_status()
        for message in self._link.receive(self._patience_s()):
            self._obey(message)
        self._changed |= self._core.answer_requests()
        self._deactivate()
        if self._open or self._busy:
            self._step()

    def _patience_s(self) -> float:
        """A core that holds requests but has no room is stepped again soon: other engines may have
        freed memory, which is not announced. `_stalled` detects this also in a core that calls
        itself busy: its last step took no time and put nothing out."""
        if self._busy and not self._stalled:
            return 0.0
        until_status_s = self._status_due_s() - self._clock()
        soon = self._open or self._leaving
        return min(STALLED_RETRY_S, until_status_s) if soon else until_status_s

    def _step(self) -> None:
        started_s = self._clock()
        output = self._core.step()
        self._busy = output.busy
        silent = not (output.chunks or output.failures)
        self._stalled = silent and self._clock() - started_s < STALLED_STEP_S
        self._changed = True
        self._send_output(output)

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

    def _obey(self, message: ToEngine) -> None:
        self._changed = True
        match message:
            case Submit(requests=requests):
                self._submit(requests)
            case Cancel(request_ids=ids):
                self._core.cancel([i for i in ids if i in self._open])
            case ActivateEngine():
                self._activate(message)
            case Deactivate():
                self._leave()
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
        if mine:
            self._core.submit(mine)

    def _export(self, targets: Sequence[str] | None) -> None:
        requests = self._core.export(targets)
        for request in requests:
            self._open.pop(request.id, None)
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
            self._model = name
            log.info("activated %s", name)
            self._link.send(activated)
        except ActivationError as error:
            log.warning("activation of %s failed: %s", name, error)
            self._link.send(activation_failed(name, error))
        self._activating = None

    def _leave(self) -> None:
        """Answers also when no model is active, so that an agent with an old view recovers."""
        model, self._model = self._model or "", None
        self._fail(self._open, "model_evicted", f"{model} left this engine while serving")
        self._open = {}
        self._busy = False
        self._leaving = self._leaving or (model, self._clock())
        self._deactivate()

    def _deactivate(self) -> None:
        """Waits until exported KV was fetched, or its time is over."""
        if self._leaving is None or self._core.handing_over():
            return
        (model, started_s), self._leaving = self._leaving, None
        if model:
            self._core.deactivate()
            # The last counters of this model: what the deactivation itself unmapped included.
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
        # Before the agent hears of it, which then kills this process.
        log.error("engine failed: %s", text, exc_info=error)
        is_known = isinstance(error, RequestsFailedError | LedgerCorruptError)
        blame: Literal["suspect", "other"] = "other" if is_known else "suspect"
        self._fail(self._open, "engine_error", text, blame)
        # A lost rank says nothing about the model: the agent sees the end and takes another one.
        if self._activating is not None and not isinstance(error, RankLostError):
            self._link.send(ActivationFailed(model=self._activating, message=text))


def run_engine(context: EngineContext, create: Callable[[EngineContext], EngineCore]) -> int:
    """The body of an engine process; returns its exit code.

    SIGTERM ends it like Shutdown. Raises what the core raises, after its requests were failed.
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
