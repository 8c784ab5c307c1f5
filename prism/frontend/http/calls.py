"""Middleware for every HTTP request: its id, HEAD, and the access log."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism.config.schema.access import ApiKey

ID_HEADER = "x-request-id"
# Number of times that an SDK of OpenAI or Anthropic has sent the request before.
_RETRIES_HEADER = "x-stainless-retry-count"
# Request ids that are accepted from clients, since they are logged; others are replaced.
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_PATH_CHARS_MAX = 200
# With these statuses the path is arbitrary text, possibly a part of a prompt, and is not logged.
_UNKNOWN_PATHS = (404, 405)
# Requested every few seconds by monitoring programs; logged at DEBUG.
_PROBES = ("/health", "/metrics", "/status")

log = logging.getLogger("prism.access")


@dataclass(slots=True)
class Call:
    """One HTTP request as it is logged: without prompt, key and query."""

    id: str
    method: str = ""
    path: str = ""
    client: str = ""
    model: str = ""
    generation: str = ""  # id in the answer, which agents and engines log too
    key: str = ""  # the name of the API key
    prompt_tokens: int = 0
    output_tokens: int = 0
    api_key: ApiKey | None = None
    traceparent: str = ""  # header with the client's span
    retried: bool = False  # the client says that it has sent the request before
    arrived_s: float = field(default_factory=time.monotonic)  # see `GuardedProtocol`
    at_end: list[Callable[[], object]] = field(default_factory=list)


_UNLOGGED = ("api_key", "traceparent", "retried", "arrived_s", "at_end")
_LOGGED = tuple(f.name for f in dataclasses.fields(Call) if f.name not in _UNLOGGED)

current: ContextVar[Call | None] = ContextVar("call", default=None)


def arrived_s() -> float:
    """Returns the arrival time of the current request on the monotonic clock, in seconds."""
    return (current.get() or Call("")).arrived_s


class CallMiddleware:
    """ASGI middleware that sets `current`, and logs a line of JSON per request if `access_log`."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app = app
        self._logs = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call, status = _call_of(scope), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = call.id
            await send(message)

        token = current.set(call)
        scope.setdefault("state", {})["call"] = call
        try:
            await self._app(_as_get(scope), receive, send_with_id)
        except Exception:
            status = 500  # sent by starlette, outside of all middleware
            raise
        finally:
            current.reset(token)
            for release in call.at_end:
                release()
            if self._logs:
                _write(call, status, time.monotonic() - call.arrived_s)


def _call_of(scope: Scope) -> Call:
    headers = Headers(scope=scope)
    wanted = headers.get(ID_HEADER, "")
    return Call(
        id=wanted if _ID.fullmatch(wanted) else uuid4().hex,
        method=scope["method"],
        path=scope["path"][:_PATH_CHARS_MAX],
        client=(scope.get("client") or ("",))[0],
        traceparent=headers.get("traceparent", ""),
        retried=headers.get(_RETRIES_HEADER, "0") != "0",
        arrived_s=scope.get("state", {}).get("arrived_s") or time.monotonic(),
    )


def _as_get(scope: Scope) -> Scope:
    """Returns the scope with HEAD as GET: uvicorn omits the body of the answer to a HEAD."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _write(call: Call, status: int, seconds: float) -> None:
    """Logs a request. Status 0 means that the client disconnected before the answer began."""
    level = logging.DEBUG if call.path in _PROBES else logging.INFO
    if not log.isEnabledFor(level):
        return
    known = {name: getattr(call, name) for name in _LOGGED}
    if status in _UNKNOWN_PATHS:
        del known["path"]
    fields = {name: value for name, value in known.items() if value}
    line = {**fields, "status": status, "ms": round(seconds * 1000, 1)}
    log.log(level, msgspec.json.encode(line).decode())
