"""The thread that serves a process's offers, one frame of one connection at a time."""

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
"""How long another process may take to send a question, and to take the answer."""
PAUSE_S = 0.05
"""How long to wait before accepting again when this process has no descriptor left."""
_malformed = [0]
_counting = threading.Lock()


def malformed_total() -> int:
    """Connections to this process's offers that were hung up on: of another user, or with a frame
    that is none."""
    return _malformed[0]


def _count_malformed() -> None:
    with _counting:
        _malformed[0] += 1


class Shelf(Protocol):
    """What is served; see `Offers`."""

    def leave(self) -> bool: ...
    def give_up(self) -> None: ...
    def expire(self) -> float: ...
    def end(self, key: str) -> None: ...
    def terms(
        self, hello: wire.Hello, link: socket.socket
    ) -> tuple[wire.OfferTerms, NDArray[np.int64] | None]: ...
    def export(self, key: str, first: int, count: int) -> tuple[bytes, list[int]]: ...
    def fetched(self, key: str, link: socket.socket) -> bool: ...


class OfferServer:
    """Listens at an abstract address, which goes with the process and serves this user alone. Lives
    as long as there are offers.

    An offer whose fetcher hangs up is over.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.name = f"kvcached-{os.getpid()}-{os.urandom(8).hex()}"
        self._shelf = shelf
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
            self._opened = opened.pop_all()  # the thread's from here on

    def wake(self) -> None:
        """Something changed. Any thread."""
        with contextlib.suppress(OSError):  # it has not seen the last one yet, or has ended
            self._waker.send(b"!")

    def join(self) -> None:
        """Returns once the thread has ended, which it does when there is nothing to serve."""
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._shelf.leave():
                for key, _ in self._selector.select(self._shelf.expire()):
                    self._look_at(key.data)
        except BaseException:  # offers must not wait for a dead thread
            self._shelf.give_up()
            raise
        finally:
            for link in self._keys:
                link.close()
            self._opened.close()

    def _look_at(self, link: socket.socket) -> None:
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
            self._hang_up(link)

    def _answer(self, link: socket.socket, payload: bytes, until_s: float) -> None:
        key = self._keys[link]
        if not key:
            self._introduce(link, wire.decode_hello(payload), until_s)
            return
        (first, count), *_ = wire.unpack_pairs(payload) or [(0, 0)]
        if count == 0:
            if self._shelf.fetched(key, link):
                wire.send(link, wire.pack_pairs([(0, 0)]), until_s)
            self._hang_up(link)
            return
        places, files = self._shelf.export(key, first, count)
        try:
            wire.send(link, places, until_s, files)
        finally:
            wire.close_all(files)

    def _introduce(self, link: socket.socket, hello: wire.Hello, until_s: float) -> None:
        terms, ids = self._shelf.terms(hello, link)
        if ids is not None:
            self._keys[link] = hello.key
        wire.send(link, wire.encode(terms), until_s)
        if ids is None:
            self._hang_up(link)
        else:
            wire.send(link, ids.tobytes(), until_s)

    def _hang_up(self, link: socket.socket) -> None:
        key = self._keys.pop(link)
        self._selector.unregister(link)
        link.close()
        if key:
            self._shelf.end(key)
