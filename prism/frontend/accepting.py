"""Accept the connections of a listener many at a time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from ssl import SSLContext
from typing import Any

log = logging.getLogger(__name__)

# In a turn of the event loop. Frontends that share a listener each get a part of a burst, and
# connections beyond the frontend's bound are closed before they use up its descriptors.
ACCEPTED_PER_TURN = 64
_RETRY_S = 0.1


class Acceptor:
    """Server of one listener, for a loop whose own server accepts one connection in each turn: of
    a burst the last client would wait for as many turns, which may each write to all streams.

    It owns the listener from its start to `close`. A lack of descriptors or memory leaves clients
    in the backlog until there are some.
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
        """Returns whether a connection was accepted that its protocol does not know yet."""
        return bool(self._beginning)

    def close(self) -> None:
        """Connections that are accepted stay."""
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
            # Made now, since its connection's time begins now.
            task = self._loop.create_task(self._begin(self._protocols(), client))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _pause(self, error: OSError) -> None:
        """Stops listening for a moment: the listener stays readable, and each turn would fail."""
        if not self._lacking:
            log.warning("cannot accept connections, which wait: %s", error)
        self._lacking = True
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_RETRY_S, self._listen)

    async def _begin(self, protocol: asyncio.Protocol, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, client, **self._tls)
        except OSError as error:  # also of TLS
            log.debug("a connection did not begin: %s", error)
            client.close()
