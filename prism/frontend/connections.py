"""Connections that send no whole request have a deadline, and make room for others."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

# From the connection's start, or its first byte behind an answer, to the end of the headers.
HEAD_TIMEOUT_S = 30.0
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with two bounds. Take a class of `guarded_protocol` for each server.

    A client has `head_timeout_s` to send the headers of a request. Of more than `connections_max`
    connections the one is closed that has been without a whole request for longest; where all of
    them are being served, the new one gets a 503.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    connections_max = 1 << 16
    # Those without a whole request, since the oldest first.
    incomplete: dict[GuardedProtocol, None]

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.incomplete[self] = None
        self._note_progress(began=True)
        if len(self.connections) > self.connections_max:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.incomplete.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_progress(began=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_progress(began=False)

    def _note_progress(self, began: bool) -> None:
        """`began`: bytes of a request have come, or are due now; otherwise the time that uvicorn
        keeps idle connections counts."""
        answered = self.cycle is None or self.cycle.response_complete
        if not answered:
            self._stop_timer()
        elif began and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._end)
        if not answered and not self.cycle.more_body:
            self.incomplete.pop(self, None)
        else:
            self.incomplete.setdefault(self, None)

    def _make_room(self) -> None:
        oldest = next(iter(self.incomplete))
        if oldest is self:
            self.transport.write(_FULL)
        oldest._end()

    def _end(self) -> None:
        self._stop_timer()
        self.incomplete.pop(self, None)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def guarded_protocol(
    connections_max: int, head_timeout_s: float = HEAD_TIMEOUT_S
) -> type[GuardedProtocol]:
    """For one server."""
    bounds = {"connections_max": connections_max, "head_timeout_s": head_timeout_s}
    return type("GuardedProtocol", (GuardedProtocol,), {**bounds, "incomplete": {}})
