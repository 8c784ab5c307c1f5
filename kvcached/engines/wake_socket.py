"""Wake-ups of a sleeping process that plans the steps of an engine's ranks.

Requests of other engines come to the processes that have the ranks' memory. Their threads send an
empty datagram to the planning process, which polls its socket together with its other input.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from select import POLLIN, poll

from kvcached.client import Client

NUMBER_MAX = (1 << 62) - 1


def bound_socket(number: int) -> socket.socket:
    """Returns the planning process's socket, which does not block. `number` is a random one, up to
    NUMBER_MAX."""
    made = _socket()
    made.bind(_name(number))
    return made


def drain(bound: socket.socket) -> None:
    """Makes the socket unreadable until the next wake-up."""
    with contextlib.suppress(BlockingIOError):
        while True:
            bound.recv(1)


class RequestWatch:
    """Thread that wakes the planning process when other engines send requests to `client`."""

    def __init__(self, client: Client, number: int) -> None:
        self._name = _name(number)
        self._socket = _socket()
        self._answered = threading.Event()
        self._polled = poll()
        self._polled.register(client.fileno(), POLLIN)
        threading.Thread(target=self._watch, name="kvcached-requests", daemon=True).start()

    def notify_answered(self) -> None:
        """Lets the next request wake the process. REQUIRES: pending ones are answered."""
        self._answered.set()

    def _watch(self) -> None:
        while True:
            self._polled.poll()
            self._answered.clear()
            with contextlib.suppress(OSError):  # not bound yet, or gone
                self._socket.sendto(b"", self._name)
            self._answered.wait()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


def _name(number: int) -> str:
    return f"\0kvcached-wake-{number}"
