"""The agent's ends of its sockets: to engines, to the cluster scheduler and to frontends."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from prism.messages.agent import ActionResult, AgentCommand, AgentReport, FromScheduler
from prism.messages.engine import FromEngine, ToEngine
from prism.messages.requests import Chunk, EngineOutput, Failure, Request, Started
from prism.transport import ENGINE_MESSAGE_BYTES_MAX, BlockingChannel, Channel

log = logging.getLogger(__name__)

REPORTS_HIGH_WATER = 100
OUTPUT_HIGH_WATER = 10_000
LINGER_MS = 1000


class EngineLink:
    """A ROUTER that engines connect to with their id as identity. For one event loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        # Mandatory: a send to an engine that is not connected, or takes nothing, is an error.
        options = {
            "router_mandatory": 1,
            "router_handover": 1,
            "maxmsgsize": ENGINE_MESSAGE_BYTES_MAX,
        }
        self._channel = Channel[FromEngine](context, zmq.ROUTER, FromEngine, **options)
        self._endpoint = endpoint

    def bind(self) -> None:
        """Take the address, from a predecessor as well."""
        self._channel.bind(self._endpoint)

    def send(self, engine_id: str, message: ToEngine) -> bool:
        """Never blocks. False: the engine is gone or hangs; its end is noticed elsewhere."""
        try:
            self._channel.send(message, to=engine_id.encode())
        except zmq.ZMQError as error:
            log.warning("%s did not take %s: %s", engine_id, type(message).__name__, error)
            return False
        return True

    async def receive(self) -> tuple[str, FromEngine]:
        """The next message and its sender."""
        identity, message = await self._channel.receive()
        return identity.decode(errors="replace"), message

    def close(self) -> None:
        self._channel.close()


class SchedulerLink:
    """A DEALER whose identity is the device's name. It reconnects by itself. What is sent while
    no scheduler is there is dropped, since the next report says it again."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, device: str) -> None:
        self._channel = Channel[FromScheduler](
            context,
            zmq.DEALER,
            FromScheduler,
            identity=device.encode(),
            linger=200,
            immediate=1,
            sndhwm=REPORTS_HIGH_WATER,
        )
        self._channel.connect(endpoint)

    def send(self, message: AgentReport | ActionResult) -> bool:
        """Never blocks. False: no scheduler is there."""
        try:
            self._channel.send(message)
        except zmq.ZMQError:
            return False
        return True

    async def receive(self) -> AgentCommand:
        """The next command."""
        while True:
            _, message = await self._channel.receive()
            if not isinstance(message, ActionResult):
                return message

    def close(self) -> None:
        self._channel.close()


class OutputBatch:
    """Output of one event, grouped by the frontend it goes to."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[str, str], EngineOutput] = {}

    def chunk(self, request: Request, chunk: Chunk) -> None:
        self.output(request.reply_to, request.frontend_id).chunks.append(chunk)

    def started(self, request: Request, started: Started) -> None:
        self.output(request.reply_to, request.frontend_id).started.append(started)

    def failure(self, request: Request, failure: Failure) -> None:
        self.output(request.reply_to, request.frontend_id).failures.append(failure)

    def items(self) -> list[tuple[str, str, EngineOutput]]:
        """(reply_to, frontend id, output)."""
        return [(*address, output) for address, output in self._by_address.items()]

    def output(self, reply_to: str, frontend_id: str) -> EngineOutput:
        """What goes to this frontend."""
        address = (reply_to, frontend_id)
        output = self._by_address.get(address)
        if output is None:
            output = self._by_address[address] = EngineOutput(chunks=[], failures=[], started=[])
        return output


class TokenSender:
    """A PUSH socket per frontend, opened at its first output. Never blocks. A frontend that does
    not take its output (OUTPUT_HIGH_WATER messages behind) counts as dead: `on_dead(its id)`."""

    def __init__(self, on_dead: Callable[[str], None]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._on_dead = on_dead
        self._channels: dict[str, BlockingChannel[None]] = {}
        self._addresses: dict[str, set[str]] = {}

    def send(self, batch: OutputBatch) -> None:
        for reply_to, frontend_id, output in batch.items():
            try:
                channel = self._channels.get(reply_to) or self._open(reply_to, frontend_id)
                channel.send(output, block=False)
            except zmq.ZMQError as error:
                log.warning("frontend %s at %s takes nothing: %s", frontend_id, reply_to, error)
                self.drop(frontend_id)
                self._on_dead(frontend_id)

    def drop(self, frontend_id: str) -> None:
        """Close its sockets; what they hold is lost, unless it is taken within LINGER_MS."""
        for reply_to in self._addresses.pop(frontend_id, ()):
            if (channel := self._channels.pop(reply_to, None)) is not None:
                channel.close(LINGER_MS)

    def frontends(self) -> set[str]:
        return set(self._addresses)

    def close(self) -> None:
        """What was sent still goes out, for LINGER_MS at most."""
        for channel in self._channels.values():
            channel.close(LINGER_MS)
        self._channels.clear()
        self._context.term()

    def _open(self, reply_to: str, frontend_id: str) -> BlockingChannel[None]:
        channel = BlockingChannel[None](self._context, zmq.PUSH, sndhwm=OUTPUT_HIGH_WATER)
        self._channels[reply_to] = channel
        self._addresses.setdefault(frontend_id, set()).add(reply_to)
        channel.connect(reply_to)
        return channel
