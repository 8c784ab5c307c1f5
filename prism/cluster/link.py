"""The scheduler's socket: reports and results come in, orders go out (§7.1: ZeroMQ)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from prism.errors import ActionError
from prism.messages import (
    ActionResult,
    ActivateModel,
    AgentReport,
    EvictModel,
    ModelSpec,
    OperatorCommand,
    PrefetchModel,
    ToScheduler,
    TrimModel,
)

Order = ActivateModel | EvictModel | PrefetchModel | TrimModel
SEND_HIGH_WATER = 1000

log = logging.getLogger("prism.cluster")


class Link:
    """A ROUTER that agents (identity = device) and operators connect to. For one event loop.

    Action ids are unique over restarts, so that an answer to an earlier scheduler is dropped.
    `unreachable`: whom something could not be sent to, for the owner to look at and clear.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        # An agent that starts again takes over its predecessor's identity, and a send to a
        # device without an agent is an error instead of silence.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_id = time.time_ns() // 1_000_000
        self.unreachable: set[str] = set()
        self._waiting: dict[int, tuple[str, str, asyncio.Future[ActionResult]]] = {}

    async def run(
        self,
        on_report: Callable[[AgentReport], None],
        on_command: Callable[[bytes, OperatorCommand], None],
    ) -> None:
        """Receive until cancelled. Malformed messages are logged and dropped."""
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                message = self._decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed message of %r: %s", identity, error)
                continue
            if isinstance(message, ActionResult):
                self._settle(message)
            elif isinstance(message, OperatorCommand):
                on_command(identity, message)
            elif identity.decode(errors="replace") == message.device:
                on_report(message)
            else:
                log.warning("dropped a report about %s sent by %r", message.device, identity)

    async def post(self, device: str, order: Order) -> asyncio.Future[ActionResult]:
        """Send `order` under a fresh action id; the future is its result.

        Raises ActionError when no agent is connected for the device.
        """
        self._last_id += 1
        action_id = self._last_id
        result: asyncio.Future[ActionResult] = asyncio.get_running_loop().create_future()
        model = order.model.name if isinstance(order.model, ModelSpec) else order.model or ""
        self._waiting[action_id] = (device, model, result)
        result.add_done_callback(lambda _: self._waiting.pop(action_id, None))
        try:
            await self._send(device.encode(), msgspec.structs.replace(order, action_id=action_id))
        except ActionError:
            result.cancel()
            raise
        return result

    async def ask(self, device: str, order: Order, timeout_s: float) -> ActionResult:
        """`post`, then wait for a good result; raises ActionError for any other outcome."""
        return await settle(await self.post(device, order), device, timeout_s)

    async def is_connected(self, device: str) -> bool:
        """Whether an agent holds a connection for this device. It sees an ActionResult that
        answers nothing, which agents ignore."""
        try:
            await self._send(device.encode(), ActionResult(0, True))
        except ActionError:
            return False
        return True

    async def answer(self, identity: bytes, result: ActionResult) -> None:
        """Reply to an operator; one who has gone is logged."""
        try:
            await self._send(identity, result)
        except ActionError as error:
            log.warning("an operator did not wait for its answer: %s", error)

    def give_up(self, device: str, why: str, model: str | None = None) -> None:
        """Fail what waits for this device's agent (for one model, or all of it)."""
        for there, name, result in list(self._waiting.values()):
            if there == device and model in (None, name) and not result.done():
                result.set_exception(ActionError(why))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _settle(self, message: ActionResult) -> None:
        _, _, result = self._waiting.get(message.action_id, ("", "", None))
        if result is not None and not result.done():
            result.set_result(message)

    async def _send(self, identity: bytes, message: Order | ActionResult) -> None:
        try:
            await self._socket.send_multipart([identity, self._encoder.encode(message)])
        except zmq.ZMQError as error:
            name = identity.decode(errors="replace")
            self.unreachable.add(name)
            raise ActionError(f"no agent is connected for {name}: {error}") from error


async def settle(
    result: asyncio.Future[ActionResult], device: str, timeout_s: float
) -> ActionResult:
    """Wait for an order's result; raises ActionError unless it is good."""
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await result
    except TimeoutError:
        raise ActionError(f"{device} gave no answer within {timeout_s:g} s") from None
    if not outcome.ok:
        raise ActionError(outcome.message or f"{device} failed without a message")
    return outcome
