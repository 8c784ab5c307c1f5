"""Thread that serves a process's offers, one frame of one connection at a time."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

from kvcached.errors import KvcachedError
from kvcached.handover import wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FRAME_S = 1.0
"""Time for another process to send a request, and to receive the answer."""
PAUSE_S = 0.05
"""Wait before the next accept when this process is out of descriptors."""
_malformed = [0]
_counting = threading.Lock()


def malformed_total() -> int:
    """Returns the number of connections that were closed for another user or a malformed frame."""
    return _malformed[0]


def _count_malformed() -> None:
    with _counting:
        _malformed[0] += 1


class OfferSource(Protocol):
    """Offers to serve; see `Offers`."""

    def end_if_unused(self) -> bool: ...
    def abandon(self) -> None: ...
    def expire(self) -> float: ...
    def end(self, key: str) -> None: ...
    def terms(
        self, hello: wire.Hello, link: socket.socket
    ) -> tuple[wire.OfferTerms, NDArray[np.int64] | None]: ...
    def export(self, key: str, first: int, count: int) -> tuple[bytes, list[int]]: ...
    def fetched(self, key: str, link: socket.socket) -> bool: ...


class OfferServer:
    """Server at an abstract address, which ends with the process and serves this user alone.

    Lives as long as there are offers. An offer ends when its fetcher disconnects.
    """

    def __init__(self, source: OfferSource) -> None:
        self.name = f"kvcached-{os.getpid()}-{os.urandom(8).hex()}"
        self._source = source
        self._keys: dict[socket.socket, str] = {}
        with contextlib.ExitStack() as opened:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            opened.callback(self._listener.close)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
            self._waker, self._woken = socket.socketpair()
            opened.callback(self._waker.close)
            opened.callback(self._woken.close)
            self._waker.setblocking(False)
            self._selector = selectors.DefaultSelector()
            opened.callback(self._selector.close)
            for each in (self._listener, self._woken):
                self._selector.register(each, selectors.EVENT_READ, each)
            self._thread = threading.Thread(target=self._run, name="kvcached-offers", daemon=True)
            self._thread.start()
            self._opened = opened.pop_all()  # owned by the thread from now on

    def wake(self) -> None:
        """Makes the thread look at the offers again. Any thread."""
        with contextlib.suppress(OSError):  # a wake-up is pending, or the thread has ended
            self._waker.send(b"!")

    def join(self) -> None:
        """Returns once the thread has ended, which it does when there is nothing to serve."""
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._source.end_if_unused():
                for key, _ in self._selector.select(self._source.expire()):
                    self._handle(key.data)
        except BaseException:  # without the thread the offers would stay open
            self._source.abandon()
            raise
        finally:
            for link in self._keys:
                link.close()
            self._opened.close()

    def _handle(self, link: socket.socket) -> None:
        if link is self._woken:
            link.recv(4096)
        elif link is self._listener:
            self._accept()
        else:
            self._serve(link)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            time.sleep(PAUSE_S)
            return
        if not wire.is_same_user(link):
            _count_malformed()
            link.close()
            return
        self._keys[link] = ""
        self._selector.register(link, selectors.EVENT_READ, link)

    def _serve(self, link: socket.socket) -> None:
        try:
            until_s = time.monotonic() + FRAME_S
            payload, _ = wire.receive(link, until_s, bytes_max=wire.ASK_BYTES_MAX)
            self._answer(link, payload, time.monotonic() + FRAME_S)
        except KvcachedError as error:
            if isinstance(error, wire.MalformedFrameError):
                _count_malformed()
            self._disconnect(link)

    def _answer(self, link: socket.socket, payload: bytes, until_s: float) -> None:
        key = self._keys[link]
        if not key:
            self._send_terms(link, wire.decode_hello(payload), until_s)
            return
        (first, count), *_ = wire.unpack_pairs(payload) or [(0, 0)]
        if count == 0:
            if self._source.fetched(key, link):
                wire.send(link, wire.pack_pairs([(0, 0)]), until_s)
            self._disconnect(link)
            return
        places, files = self._source.export(key, first, count)
        try:
            wire.send(link, places, until_s, files)
        finally:
            wire.close_all(files)

    def _send_terms(self, link: socket.socket, hello: wire.Hello, until_s: float) -> None:
        terms, ids = self._source.terms(hello, link)
        if ids is not None:
            self._keys[link] = hello.key
        wire.send(link, wire.encode(terms), until_s)
        if ids is None:
            self._disconnect(link)
        else:
            wire.send(link, ids.tobytes(), until_s)

    def _disconnect(self, link: socket.socket) -> None:
        key = self._keys.pop(link)
        self._selector.unregister(link)
        link.close()
        if key:
            self._source.end(key)
