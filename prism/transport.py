"""Typed messages over ZeroMQ: structs go out as MessagePack, and what comes in is checked.

A message is one frame. One that cannot be decoded is logged, counted and dropped: a stranger's
bytes must neither end nor stall a process. libzmq disconnects a peer that sends more than
MESSAGE_BYTES_MAX at once, and that message is lost. Options are pyzmq's names of socket options,
such as `sndhwm=100`; `maxmsgsize` is another bound in bytes.

A peer of another user is disconnected before it can say anything, by the kernel's word on who it is
(SO_PEERCRED). A bound `ipc` socket whose file was removed is bound again: connections stand without
the file, but nobody new could connect. Beyond the machine (`tcp`) peers need the cluster's key
(`curve.py`); a socket without one opens nothing there.
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

from prism.curve import TCP, KeyHolders, secured
from prism.messages import MALFORMED_ERRORS

M = TypeVar("M")
Socket = TypeVar("Socket", bound="zmq.Socket[Any]")
MESSAGE_BYTES_MAX = 16 << 20  # a second of decoding at most
# Prompts and outputs of all requests of an engine may come in one message.
ENGINE_MESSAGE_BYTES_MAX = 256 << 20
_LOGGED_EACH = 10  # malformed messages of a channel; of later ones only the 16th, 32nd, ...
# With a message ready, pyzmq returns it without a turn of the loop. A fast sender must not keep
# other tasks from running.
_MESSAGES_PER_TURN = 64
_LOOK_S = 1.0  # between two looks whether a socket's file is still there
_IPC = "ipc://"

log = logging.getLogger("prism.transport")
_encode = msgspec.msgpack.Encoder().encode

_counts: Counter[str] = Counter()


def malformed_total() -> int:
    """Malformed messages that this process has dropped, over all channels."""
    return _counts["malformed"]


def count_malformed(count: int = 1) -> None:
    """So many were dropped that came another way, as over a pipe, or to a child."""
    _counts["malformed"] += count


class Channel(Generic[M]):
    """A socket that receives messages of one type. For one event loop.

    A ROUTER names the peer of each message; for other sockets the peer is b"".
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
        # Its own way of waiting: zmq.asyncio's costs more than what most messages say.
        plain: zmq.Socket[bytes] = cast(Any, context).socket(kind, socket_class=zmq.Socket)
        self._socket = _open(plain, options)
        self._news: asyncio.Future[None] | None = None  # while somebody waits
        self._routes = kind == zmq.ROUTER
        self._decode = _Decoder(receives)
        self._taken = 0
        self._staying: asyncio.Task[None] | None = None
        self._holders: KeyHolders | None = None

    def connect(self, endpoint: str) -> None:
        """Raises zmq.ZMQError or NoClusterKeyError."""
        with secured(self._socket, endpoint, self._secret, server=False):
            self._socket.connect(endpoint)

    def bind(self, endpoint: str) -> None:
        """Raises zmq.ZMQError or NoClusterKeyError. REQUIRES: a running loop; of a context's
        sockets, one alone is bound beyond the machine."""
        with secured(self._socket, endpoint, self._secret, server=True):
            if endpoint.startswith(TCP) and self._holders is None:
                self._holders = KeyHolders(self._context, self._secret)
            self._socket.bind(endpoint)
        if endpoint.startswith(_IPC):
            self._staying = asyncio.create_task(self._stay_bound(endpoint))

    async def _stay_bound(self, endpoint: str) -> None:
        """A second bind makes a second listener; what is connected by the first one stays."""
        path = endpoint.removeprefix(_IPC)
        while not self._socket.closed:
            if _is_gone(path):
                with suppress(zmq.ZMQError):  # its folder is gone as well, or no descriptor is left
                    self._socket.bind(endpoint)
                    self._look()
                    log.warning("%s was removed; it is there again", path)
            await asyncio.sleep(_LOOK_S)

    async def receive(self) -> tuple[bytes, M]:
        """The next message, and who sent it."""
        while True:
            self._taken += 1
            if self._taken >= _MESSAGES_PER_TURN:
                self._taken = 0
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
        """Messages that are there, at most _MESSAGES_PER_TURN. Never blocks."""
        found = []
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            sender = frames.pop(0) if self._routes else b""
            self._taken += 1
            if (message := self._decode(frames, sender)) is not None:
                found.append(message)
        return found

    def send(self, message: msgspec.Struct, to: bytes = b"") -> None:
        """Never blocks. Raises zmq.ZMQError if the message is not taken: the peer is not
        connected, or it is too slow."""
        frames = [to, _encode(message)] if self._routes else [_encode(message)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._look()

    async def _wait(self) -> None:
        """Until a message may be there. Its descriptor is readable when something has changed, and
        until anything was asked of the socket: whoever does anything else with it looks, too."""
        loop = asyncio.get_running_loop()
        descriptor, self._news = self._socket.FD, loop.create_future()
        loop.add_reader(descriptor, self._look)
        try:
            await self._news
        finally:
            loop.remove_reader(descriptor)
            self._news = None

    def _look(self) -> None:
        news = self._news
        if news is None or news.done():
            return
        if self._socket.poll(0):
            news.set_result(None)

    def close(self) -> None:
        if self._staying is not None:
            self._staying.cancel()
        if self._holders is not None:
            self._holders.close()
        self._socket.close()


class BlockingChannel(Generic[M]):
    """A socket of one thread, with one peer, that receives messages of one type.

    `socket` is there to be polled, together with other descriptors.
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
        self.bind = self.socket.bind  # on this machine alone

    def connect(self, endpoint: str) -> None:
        """Raises zmq.ZMQError or NoClusterKeyError."""
        with secured(self.socket, endpoint, self._secret, server=False):
            self.socket.connect(endpoint)

    def receive(self, count_max: int) -> list[M]:
        """Messages that have arrived. Never blocks."""
        received = (self._take() for _ in range(count_max))
        frames = iter(lambda: next(received, None), None)
        return [m for f in frames if (m := self._decode(f)) is not None]

    def send(self, message: msgspec.Struct, block: bool = True) -> None:
        """If the peer is too slow, this blocks, or raises zmq.ZMQError where it must not."""
        self.socket.send(_encode(message), 0 if block else zmq.NOBLOCK)

    def close(self, linger_ms: int | None = None) -> None:
        """`linger_ms`: how long what was sent may still go out (None: the socket's option)."""
        self.socket.close(linger=linger_ms)

    def _take(self) -> list[bytes] | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


class _Decoder:
    """Decodes the messages of one channel, and counts those that are malformed."""

    def __init__(self, receives: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._malformed = 0

    def __call__(self, frames: list[bytes], sender: bytes = b"") -> Any:
        """None: the message is malformed."""
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
        if count <= _LOGGED_EACH or count & (count - 1) == 0:
            size = sum(map(len, frames))
            text = "dropped a malformed message of %r, %d bytes (number %d here): %.500s"
            log.warning(text, sender, size, count, why)


def _is_gone(path: str) -> bool:
    """Or something else has its name, which a bind removes."""
    try:
        return not stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return True


def _open(socket: Socket, options: dict[str, Any]) -> Socket:
    """Without an option, what was not sent when the socket is closed is dropped."""
    always = {"linger": 0, "maxmsgsize": MESSAGE_BYTES_MAX, "ipc_filter_uid": os.geteuid()}
    for name, value in {**always, **options}.items():
        setattr(socket, name, value)
    return socket
