"""The scheduler's socket: reports and results come in, commands go out (§7.1: ZeroMQ)."""

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
from prism.messages.models import ModelSpec
from prism.transport import Channel

SEND_HIGH_WATER = 1000

log = logging.getLogger("prism.cluster")


class AgentLinks:
    """A ROUTER that agents (identity = device) and operators connect to. For one event loop.

    Action ids are unique over restarts, so that an answer to an earlier scheduler is dropped.
    """

    def __init__(self, endpoints: Sequence[str], secret: str = "") -> None:
        self._context = zmq.asyncio.Context()
        # An agent that starts again takes over its predecessor's identity, and a send to a
        # device without an agent is an error instead of silence.
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
        # Peers that a message could not be sent to; the owner looks at them and clears them.
        self.unreachable: set[str] = set()
        self._waiting: dict[int, tuple[str, str, asyncio.Future[ActionResult]]] = {}

    async def run(
        self,
        on_report: Callable[[AgentReport], None],
        on_command: Callable[[bytes, OperatorCommand], None],
    ) -> None:
        """Receive until cancelled."""
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
        """Send `command` under a fresh action id; the future is its result.

        Raises ActionError when no agent is connected for the device.
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
        """`post`, then wait for a good result; raises ActionError for any other outcome."""
        return await settle(self.post(device, command), device, timeout_s)

    def is_connected(self, device: str) -> bool:
        """Whether an agent holds a connection for this device. Agents ignore the ActionResult
        that this sends."""
        try:
            self._send(device.encode(), ActionResult(0, True))
        except ActionError:
            return False
        return True

    def answer(self, identity: bytes, result: ActionResult) -> None:
        """Reply to an operator. A reply that is not taken is logged."""
        try:
            self._send(identity, result)
        except ActionError as error:
            log.warning("an operator did not wait for its answer: %s", error)

    def give_up(self, device: str, why: str, model: str | None = None) -> None:
        """Fail what waits for this device's agent (for one model, or all of it)."""
        for there, name, result in list(self._waiting.values()):
            if there == device and model in (None, name) and not result.done():
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


async def settle(
    result: asyncio.Future[ActionResult], device: str, timeout_s: float
) -> ActionResult:
    """Wait for a command's result; raises ActionError unless it is good."""
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await result
    except TimeoutError:
        raise ActionError(f"{device} gave no answer within {timeout_s:g} s") from None
    if not outcome.ok:
        raise ActionError(outcome.message or f"{device} failed without a message")
    return outcome
