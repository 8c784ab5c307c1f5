"""Tokens on their way to the frontends."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import zmq

from prism.messages import Chunk, EngineOutput, Failure, Request

log = logging.getLogger(__name__)

SEND_HIGH_WATER = 10_000
LINGER_MS = 1000


class Parcels:
    """Output of one event, grouped by the frontend it goes to."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[str, str], EngineOutput] = {}

    def chunk(self, request: Request, chunk: Chunk) -> None:
        self._output(request).chunks.append(chunk)

    def failure(self, request: Request, failure: Failure) -> None:
        self._output(request).failures.append(failure)

    def items(self) -> list[tuple[str, str, EngineOutput]]:
        """(reply_to, frontend id, output)."""
        return [(*address, output) for address, output in self._by_address.items()]

    def _output(self, request: Request) -> EngineOutput:
        address = (request.reply_to, request.frontend_id)
        if address not in self._by_address:
            self._by_address[address] = EngineOutput(chunks=[], failures=[])
        return self._by_address[address]


class Delivery:
    """A PUSH socket per frontend, opened at its first output. Never blocks: a frontend that does
    not take its output (SEND_HIGH_WATER messages behind) counts as dead: `on_dead(frontend id)`.
    """

    def __init__(self, on_dead: Callable[[str], None]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._on_dead = on_dead
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[str, set[str]] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, parcels: Parcels) -> None:
        for reply_to, frontend_id, output in parcels.items():
            try:
                socket = self._sockets.get(reply_to) or self._open(reply_to, frontend_id)
                socket.send(self._encoder.encode(output), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.warning("frontend %s at %s takes nothing: %s", frontend_id, reply_to, error)
                self.drop(frontend_id)
                self._on_dead(frontend_id)

    def drop(self, frontend_id: str) -> None:
        """Close its sockets; what they hold is lost."""
        for reply_to in self._addresses.pop(frontend_id, ()):
            if (socket := self._sockets.pop(reply_to, None)) is not None:
                socket.close(linger=0)

    def frontends(self) -> set[str]:
        return set(self._addresses)

    def close(self) -> None:
        """What was sent still goes out, for LINGER_MS at most."""
        for socket in self._sockets.values():
            socket.close(linger=LINGER_MS)
        self._sockets.clear()
        self._context.term()

    def _open(self, reply_to: str, frontend_id: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        self._sockets[reply_to] = socket
        self._addresses.setdefault(frontend_id, set()).add(reply_to)
        socket.connect(reply_to)
        return socket
