"""Typed messages over ZeroMQ, encoded as MessagePack and checked when received.

A message is one frame. A message that cannot be decoded is logged, counted and dropped, so that
bytes of a stranger neither end nor stall a process. libzmq disconnects a peer that sends more than
MESSAGE_BYTES_MAX at once, and loses that message. Keyword options are pyzmq's names of socket
options, such as `sndhwm=100`; `maxmsgsize` sets another limit in bytes.

A peer of another user is disconnected before it can send anything, by the kernel's SO_PEERCRED. A
bound `ipc` socket whose file was removed is bound again: existing connections survive without the
file, but no peer could connect. Other machines (`tcp`) need the cluster's key (`curve.py`); a
socket without a key opens no `tcp` endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections import Counter
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from prism.curve import TCP, KeyAuthenticator, secured
from prism.messages import MALFORMED_ERRORS

M = TypeVar("M")
Socket = TypeVar("Socket", bound="zmq.Socket[Any]")
MESSAGE_BYTES_MAX = 16 << 20  # takes at most a second to decode
# Prompts and outputs of all requests of an engine may come in one message.
ENGINE_MESSAGE_BYTES_MAX = 256 << 20
# Images of several requests in such a message. Those of one request may have up to half of it.
SUBMITTED_IMAGE_BYTES_MAX = 64 << 20
_LOGGED_FIRST = 10  # malformed messages of a channel that are logged, then the 16th, 32nd, ...
# Messages that are received without yielding to the event loop. A fast sender must not keep other
# tasks from running.
_MESSAGES_PER_YIELD = 64
_FILE_CHECK_S = 1.0  # interval of checks that a socket's file exists
_IPC = "ipc://"

log = logging.getLogger("prism.transport")
_encode = msgspec.msgpack.Encoder().encode

_counts: Counter[str] = Counter()


def malformed_total() -> int:
    """Returns the number of malformed messages that this process dropped on all channels."""
    return _counts["malformed"]


def count_malformed(count: int = 1) -> None:
    """Counts malformed messages that were dropped elsewhere, such as on a pipe or in a child."""
    _counts["malformed"] += count


class Channel(Generic[M]):
    """Socket that receives messages of one type, for one event loop.

    A ROUTER names the peer of each message. For other sockets the peer is b"".
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        kind: int,
        receives: Any = None,
        secret: str = "",
        **options: Any,
    ) -> None:
        self._context, self._secret = context, secret
        # Waits without zmq.asyncio, whose overhead exceeds the cost of handling most messages.
        plain: zmq.Socket[bytes] = cast(Any, context).socket(kind, socket_class=zmq.Socket)
        self._socket = _open(plain, options)
        self._ready: asyncio.Future[None] | None = None  # set by `_wait`
        self._routes = kind == zmq.ROUTER
        self._decode = _Decoder(receives)
        self._received = 0
        self._rebinding: asyncio.Task[None] | None = None
        self._authenticator: KeyAuthenticator | None = None

    def connect(self, endpoint: str) -> None:
        """Connects to a peer. Raises zmq.ZMQError or NoClusterKeyError."""
        with secured(self._socket, endpoint, self._secret, server=False):
            self._socket.connect(endpoint)

    def bind(self, endpoint: str) -> None:
        """Binds the socket. Raises zmq.ZMQError or NoClusterKeyError.

        REQUIRES: a running event loop; only one socket of a context is bound to `tcp`.
        """
        with secured(self._socket, endpoint, self._secret, server=True):
            if endpoint.startswith(TCP) and self._authenticator is None:
                self._authenticator = KeyAuthenticator(self._context, self._secret)
            self._socket.bind(endpoint)
        if endpoint.startswith(_IPC):
            self._rebinding = asyncio.create_task(self._rebind_if_removed(endpoint))

    async def _rebind_if_removed(self, endpoint: str) -> None:
        """Binds again whenever the socket's file was removed. The second bind adds a listener;
        connections of the first one remain."""
        path = endpoint.removeprefix(_IPC)
        while not self._socket.closed:
            if _is_gone(path):
                with suppress(zmq.ZMQError):  # its directory is gone too, or no descriptor is left
                    self._socket.bind(endpoint)
                    self._check_ready()
                    log.warning("%s was removed; it was created again", path)
            await asyncio.sleep(_FILE_CHECK_S)

    async def receive(self) -> tuple[bytes, M]:
        """Returns the next message and its sender."""
        while True:
            self._received += 1
            if self._received >= _MESSAGES_PER_YIELD:
                self._received = 0
                await asyncio.sleep(0)
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await self._wait()
                continue
            sender = frames.pop(0) if self._routes else b""
            if (message := self._decode(frames, sender)) is not None:
                return sender, message

    def arrived(self) -> list[M]:
        """Returns messages that have arrived, at most _MESSAGES_PER_YIELD. Never blocks."""
        found = []
        for _ in range(_MESSAGES_PER_YIELD):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            sender = frames.pop(0) if self._routes else b""
            self._received += 1
            if (message := self._decode(frames, sender)) is not None:
                found.append(message)
        return found

    def send(self, message: msgspec.Struct, to: bytes = b"") -> None:
        """Sends a message. Never blocks. Raises zmq.ZMQError if the peer is not connected or too
        slow."""
        frames = [to, _encode(message)] if self._routes else [_encode(message)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._check_ready()

    async def _wait(self) -> None:
        """Waits until a message may have arrived. The descriptor becomes readable on a change, and
        any use of the socket resets it, so every other use calls `_check_ready`."""
        loop = asyncio.get_running_loop()
        descriptor, self._ready = self._socket.FD, loop.create_future()
        loop.add_reader(descriptor, self._check_ready)
        try:
            await self._ready
        finally:
            loop.remove_reader(descriptor)
            self._ready = None

    def _check_ready(self) -> None:
        ready = self._ready
        if ready is None or ready.done():
            return
        if self._socket.poll(0):
            ready.set_result(None)

    def close(self) -> None:
        if self._rebinding is not None:
            self._rebinding.cancel()
        if self._authenticator is not None:
            self._authenticator.close()
        self._socket.close()


class BlockingChannel(Generic[M]):
    """Socket of one thread with one peer that receives messages of one type.

    `socket` can be polled together with other descriptors.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        receives: Any = None,
        secret: str = "",
        **options: Any,
    ) -> None:
        self.socket = _open(context.socket(kind), options)
        self._secret = secret
        self._decode = _Decoder(receives)
        self.bind = self.socket.bind  # this machine's endpoints only

    def connect(self, endpoint: str) -> None:
        """Connects to the peer. Raises zmq.ZMQError or NoClusterKeyError."""
        with secured(self.socket, endpoint, self._secret, server=False):
            self.socket.connect(endpoint)

    def receive(self, count_max: int) -> list[M]:
        """Returns messages that have arrived. Never blocks."""
        received = (self._receive_one() for _ in range(count_max))
        frames = iter(lambda: next(received, None), None)
        return [m for f in frames if (m := self._decode(f)) is not None]

    def send(self, message: msgspec.Struct, block: bool = True) -> None:
        """Sends a message. If the peer is too slow, blocks, or raises zmq.ZMQError without
        `block`."""
        self.socket.send(_encode(message), 0 if block else zmq.NOBLOCK)

    def close(self, linger_ms: int | None = None) -> None:
        """Closes the socket.

        Args:
            linger_ms: Time to deliver messages that were sent. None: the socket's option.
        """
        self.socket.close(linger=linger_ms)

    def _receive_one(self) -> list[bytes] | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


class _Decoder:
    """Decoder of the messages of one channel, which counts malformed ones."""

    def __init__(self, receives: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._malformed = 0

    def __call__(self, frames: list[bytes], sender: bytes = b"") -> Any:
        """Returns the message, or None if it is malformed."""
        try:
            (frame,) = frames
        except ValueError:
            self._drop(frames, sender, f"{len(frames)} frames instead of one")
            return None
        try:
            return self._decoder.decode(frame)
        except MALFORMED_ERRORS as error:
            self._drop(frames, sender, str(error))
            return None

    def _drop(self, frames: list[bytes], sender: bytes, why: str) -> None:
        count_malformed()
        self._malformed = count = self._malformed + 1
        if count <= _LOGGED_FIRST or count & (count - 1) == 0:
            size = sum(map(len, frames))
            text = "dropped a malformed message of %r, %d bytes (number %d here): %.500s"
            log.warning(text, sender, size, count, why)


def _is_gone(path: str) -> bool:
    """Returns True if the socket's file is missing, or something else has its name. A bind replaces
    that."""
    try:
        return not stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return True


def _open(socket: Socket, options: dict[str, Any]) -> Socket:
    """Returns the socket with its options set. By default, closing it drops messages that were not
    sent."""
    always = {"linger": 0, "maxmsgsize": MESSAGE_BYTES_MAX, "ipc_filter_uid": os.geteuid()}
    for name, value in {**always, **options}.items():
        setattr(socket, name, value)
    return socket
