"""Limits on client connections: deadlines, sizes, and their number."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# From the connection's start, or the first byte after an answer, to the end of the headers.
HEAD_TIMEOUT_S = 30.0
# For a client that reads nearly nothing while more than the socket's buffers is waiting for it.
WRITE_TIMEOUT_S = 60.0
# Bytes before the headers, or the trailers of a body, are complete. One read may exceed it.
HEAD_BYTES_MAX = 1 << 16
# Requests waiting after the one that is being served. One read may contain thousands.
PIPELINED_MAX = 16
# Turns of the event loop until data that a client sent right after its connect is read.
_TURNS_TO_READ = 2
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with five limits. Each server needs its own class from `guarded_protocol`.

    - The headers of a request must be complete within `head_timeout_s` and HEAD_BYTES_MAX bytes.
    - At most PIPELINED_MAX requests wait. Later ones are dropped, and the connection closes after
      the answers to the others.
    - A client that does not read its data within `write_timeout_s` is disconnected, and its request
      is cancelled.
    - Beyond `connections_max` connections, the one that has been without a complete request for
      longest is closed. If all of them are being served, the new one gets a 503.

    `arrived_s` in the state of a request's scope is the monotonic time when its first byte was
    read. For a connection's first request it is the time of the accept, unless the loop had to wait
    for the client: the delay of a busy loop is a part of the request's latency.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    write_timeout_s = WRITE_TIMEOUT_S
    connections_max = 1 << 16
    # Connections without a complete request, the longest waiting first.
    incomplete: dict[GuardedProtocol, None]

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_full = False  # more than PIPELINED_MAX requests were received
    _head_bytes = 0  # received since the end of headers or a piece of a body, including trailers
    _served: RequestResponseCycle | None = None  # `cycle` is the last one received

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # None once the connection has sent a request, or is known to be silent.
        self._accepted_s: float | None = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.incomplete[self] = None
        self._note_progress(began=True)
        self.loop.call_soon(self._note_silence, _TURNS_TO_READ)
        if len(self.connections) > self.connections_max:
            self._close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        self.incomplete.pop(self, None)
        self.pipeline.clear()
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_full:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            if self._is_answered:
                self.transport.write(_TOO_LARGE)
            self._end()
        self._note_progress(began=True)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        arrived_s, self._accepted_s = self._accepted_s or time.monotonic(), None
        self.scope["state"]["arrived_s"] = arrived_s

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self.transport.is_closing():
            return
        if len(self.pipeline) >= PIPELINED_MAX:
            self._is_full = True
            last, _ = self.pipeline[0]
            last.keep_alive = False
        if not self._is_full:
            super().on_headers_complete()
            # Reading continues, to notice a disconnect. Further data is dropped.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._is_full:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_full:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_progress(began=False)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answered(self) -> bool:
        """True if no request is being served, so that headers of the next one are due."""
        return self.cycle is None or self.cycle.response_complete

    def _note_progress(self, began: bool) -> None:
        """Starts or stops the timer for headers. `began`: True if bytes of a request have come or
        are due. Otherwise uvicorn's time for idle connections applies."""
        answered = self._is_answered
        if not answered:
            self._stop_timer()
        elif began and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._end)
        if not answered and not self.cycle.more_body:
            self.incomplete.pop(self, None)
        else:
            self.incomplete.setdefault(self, None)

    def _note_silence(self, turns: int) -> None:
        """Drops the accept time of a connection that was opened in advance and sent nothing."""
        if turns > 0:
            self.loop.call_soon(self._note_silence, turns - 1)
        else:
            self._accepted_s = None

    def _close_oldest(self) -> None:
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

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def guarded_protocol(
    connections_max: int,
    head_timeout_s: float = HEAD_TIMEOUT_S,
    write_timeout_s: float = WRITE_TIMEOUT_S,
) -> type[GuardedProtocol]:
    """Returns a protocol class for one server."""
    bounds = {
        "connections_max": connections_max,
        "head_timeout_s": head_timeout_s,
        "write_timeout_s": write_timeout_s,
    }
    return type("GuardedProtocol", (GuardedProtocol,), {**bounds, "incomplete": {}})
