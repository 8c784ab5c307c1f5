"""Scheduler's socket: receives reports and results, sends commands (Prism §7.1: ZeroMQ)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from prism.errors import ActionError
from prism.messages.agent import ActionResult, AgentCommand, AgentReport
from prism.messages.cluster import OperatorCommand, ToScheduler
from prism.messages.model_spec import ModelSpec
from prism.transport import Channel

SEND_HIGH_WATER = 1000

log = logging.getLogger("prism.cluster")


class AgentLinks:
    """ROUTER socket that agents (identity = device) and operators connect to.

    Action ids are unique across restarts, so that results for an earlier scheduler are dropped.
    Not thread-safe: use from one event loop.
    """

    def __init__(self, endpoints: Sequence[str], secret: str = "") -> None:
        self._context = zmq.asyncio.Context()
        # Handover: a restarted agent takes over its predecessor's identity. Mandatory: a send to a
        # device without an agent raises an error.
        self._channel: Channel[ToScheduler] = Channel(
            self._context,
            zmq.ROUTER,
            ToScheduler,
            secret,
            sndhwm=SEND_HIGH_WATER,
            router_handover=1,
            router_mandatory=1,
        )
        for endpoint in endpoints:
            self._channel.bind(endpoint)
        self._last_id = time.time_ns() // 1_000_000
        # Peers to which a send failed. The controller reads and clears this set.
        self.unreachable: set[str] = set()
        self._waiting: dict[int, tuple[str, str, asyncio.Future[ActionResult]]] = {}

    async def run(
        self,
        on_report: Callable[[AgentReport], None],
        on_command: Callable[[bytes, OperatorCommand], None],
    ) -> None:
        """Receives messages and dispatches them until cancelled."""
        while True:
            sender, message = await self._channel.receive()
            if isinstance(message, ActionResult):
                self._settle(message)
            elif isinstance(message, OperatorCommand):
                on_command(sender, message)
            elif sender.decode(errors="replace") == message.device:
                on_report(message)
            else:
                log.warning("dropped a report about %s sent by %r", message.device, sender)

    def post(self, device: str, command: AgentCommand) -> asyncio.Future[ActionResult]:
        """Sends `command` with a new action id. Returns the future of its result.

        Raises ActionError if no agent is connected for the device.
        """
        self._last_id += 1
        action_id = self._last_id
        result: asyncio.Future[ActionResult] = asyncio.get_running_loop().create_future()
        self._waiting[action_id] = (device, _model_of(command), result)
        result.add_done_callback(lambda _: self._waiting.pop(action_id, None))
        try:
            self._send(device.encode(), msgspec.structs.replace(command, action_id=action_id))
        except ActionError:
            result.cancel()
            raise
        return result

    async def ask(self, device: str, command: AgentCommand, timeout_s: float) -> ActionResult:
        """Sends `command` and waits for its result. Raises ActionError unless it succeeds."""
        return await wait_for_result(self.post(device, command), device, timeout_s)

    def is_connected(self, device: str) -> bool:
        """Returns True if the device's agent is connected.

        Sends an empty ActionResult to find out, which agents ignore.
        """
        try:
            self._send(device.encode(), ActionResult(0, True))
        except ActionError:
            return False
        return True

    def answer(self, identity: bytes, result: ActionResult) -> None:
        """Sends a reply to an operator. Logs a warning if the operator has disconnected."""
        try:
            self._send(identity, result)
        except ActionError as error:
            log.warning("an operator disconnected before its reply: %s", error)

    def fail_pending(self, device: str, why: str, model: str | None = None) -> None:
        """Fails the pending commands to this device's agent, or only those of `model`."""
        for to, name, result in list(self._waiting.values()):
            if to == device and model in (None, name) and not result.done():
                result.set_exception(ActionError(why))

    def close(self) -> None:
        self._channel.close()
        self._context.term()

    def _settle(self, message: ActionResult) -> None:
        _, _, result = self._waiting.get(message.action_id, ("", "", None))
        if result is not None and not result.done():
            result.set_result(message)

    def _send(self, to: bytes, message: AgentCommand | ActionResult) -> None:
        try:
            self._channel.send(message, to)
        except zmq.ZMQError as error:
            name = to.decode(errors="replace")
            self.unreachable.add(name)
            raise ActionError(f"no agent is connected for {name}: {error}") from error


def _model_of(command: AgentCommand) -> str:
    model = getattr(command, "model", None)
    return model.name if isinstance(model, ModelSpec) else model or ""


async def wait_for_result(
    result: asyncio.Future[ActionResult], device: str, timeout_s: float
) -> ActionResult:
    """Waits for a command's result. Raises ActionError unless the command succeeds."""
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await result
    except TimeoutError:
        raise ActionError(f"{device} did not answer within {timeout_s:g} s") from None
    if not outcome.ok:
        message = outcome.message or f"{device} failed without a message"
        raise ActionError(message, outcome.lasting)
    return outcome
