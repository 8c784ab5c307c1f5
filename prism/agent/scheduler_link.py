"""The agent's end of the socket to the cluster scheduler."""

from __future__ import annotations

import logging
from asyncio import Future
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from prism.messages import (
    ActionResult,
    ActivateModel,
    AgentReport,
    Drain,
    EvictModel,
    FromScheduler,
    PrefetchModel,
    TrimModel,
)

log = logging.getLogger(__name__)

SEND_HIGH_WATER = 100

Order = ActivateModel | EvictModel | PrefetchModel | TrimModel | Drain


class SchedulerLink:
    """A DEALER whose identity is the device's name. It reconnects by itself; what is sent while
    no scheduler is there is dropped, since the next report says it again."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, device: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, device.encode())
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(FromScheduler)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: AgentReport | ActionResult) -> bool:
        """Never blocks. False: no scheduler is there."""
        # With NOBLOCK the future is done when it is returned.
        frame = self._encoder.encode(message)
        sent = cast("Future[object]", self._socket.send(frame, zmq.NOBLOCK))
        return sent.exception() is None

    async def receive(self) -> Order:
        """The next order. Malformed messages are logged and dropped."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message: FromScheduler = self._decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed order: %s", error)
                continue
            if not isinstance(message, ActionResult):
                return message

    def close(self) -> None:
        self._socket.close()
