"""Server that accepts many connections of a listener at a time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from ssl import SSLContext
from typing import Any

log = logging.getLogger(__name__)

# Connections accepted in a turn of the event loop. Frontends that share a listener each get a part
# of a burst, and connections beyond the limit are closed before they use up the descriptors.
ACCEPTED_PER_TURN = 64
_RETRY_S = 0.1


class Acceptor:
    """Server of one listener, for a loop whose own server accepts one connection per turn. With
    that, the last client of a burst would wait for as many turns, each of which may write to all
    streams.

    Owns the listener until `close`. While descriptors or memory are lacking, clients stay in the
    backlog.
    """

    def __init__(
        self,
        protocols: Callable[[], asyncio.Protocol],
        listener: socket.socket,
        tls: SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocols = protocols
        self._listener = listener
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": handshake_timeout_s}
        self._beginning: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._lacking = False
        listener.setblocking(False)
        self._listen()

    @property
    def is_beginning(self) -> bool:
        """True if a connection was accepted and is not yet passed to its protocol."""
        return bool(self._beginning)

    def close(self) -> None:
        """Closes the listener. Accepted connections stay open."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Returns at once: `close` leaves nothing to wait for."""

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            self._lacking = False
            # Created here, since it records the time of the accept.
            task = self._loop.create_task(self._begin(self._protocols(), client))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _pause(self, error: OSError) -> None:
        """Stops listening for _RETRY_S: the listener stays readable, and each turn would fail."""
        if not self._lacking:
            log.warning("cannot accept connections, which wait in the backlog: %s", error)
        self._lacking = True
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_RETRY_S, self._listen)

    async def _begin(self, protocol: asyncio.Protocol, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, client, **self._tls)
        except OSError as error:  # includes errors of TLS
            log.debug("a connection could not be set up: %s", error)
            client.close()
