"""The agent's end of its engines' sockets."""

from __future__ import annotations

import logging
from asyncio import Future
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from prism.messages import FromEngine, ToEngine

log = logging.getLogger(__name__)


class EngineLink:
    """A ROUTER that engines connect to with their id as identity. For one event loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A send to an engine that is not connected, or takes nothing, is an error, not silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._endpoint = endpoint
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def bind(self) -> None:
        """Take the address, from a predecessor as well."""
        self._socket.bind(self._endpoint)

    def send(self, engine_id: str, message: ToEngine) -> bool:
        """Never blocks. False: the engine is gone or hangs; its end is noticed elsewhere."""
        frames = [engine_id.encode(), self._encoder.encode(message)]
        # With NOBLOCK the future is done when it is returned.
        sent = cast("Future[object]", self._socket.send_multipart(frames, zmq.NOBLOCK))
        error = sent.exception()
        if error is not None:
            log.warning("%s did not take %s: %s", engine_id, type(message).__name__, error)
        return error is None

    async def receive(self) -> tuple[str, FromEngine]:
        """The next message and its sender. Malformed ones are logged and dropped."""
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                return identity.decode(errors="replace"), self._decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed message of %r: %s", identity, error)

    def close(self) -> None:
        self._socket.close()
