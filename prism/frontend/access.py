"""Access control: API keys, their models and rates, and requests from other sites."""

from __future__ import annotations

import asyncio
import hmac
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from prism.config.access import ApiKey, hashed
from prism.errors import QueueUnavailableError, RequestError
from prism.frontend import calls
from prism.frontend.errors import RateLimitError, respond
from prism.frontend.queue_retry import retry_until_available
from prism.queueing.requests import RequestQueue

OPEN_PATHS = ("/health", "/openapi.json", "/docs")
_OUTSIDE_OF_V1 = ("/tokenize", "/detokenize")  # where vLLM has them
_READING = ("GET", "HEAD", "OPTIONS")

log = logging.getLogger(__name__)


class UnauthorizedError(RequestError):
    code = "invalid_api_key"
    status = 401


class ForbiddenError(RequestError):
    code = "forbidden"
    status = 403


class CrossSiteGuard:
    """ASGI middleware that limits pages of other sites to reading, unless their origin is one of
    `origins` (`frontend.cors_origins`)."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app, self._origins = app, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_refused(scope):
            message = "not allowed for a page of another site; add it to frontend.cors_origins"
            await respond(ForbiddenError(message))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        named = {"*", headers.get("origin")} & self._origins
        return scope["method"] not in _READING and not named and _is_foreign(headers)


def _is_foreign(headers: Headers) -> bool:
    """Returns whether a browser sends the request for a page of another site.

    Browsers before 2023 do not send Sec-Fetch-Site, and no browser sends it to a server without TLS
    on another machine. The host in Origin must then be the server's. Clients that are not browsers
    send neither header.
    """
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "cross-site"
    if (origin := headers.get("origin")) is None:
        return False
    page = _host(origin)
    return page is None or page != _host(f"//{headers.get('host', '')}")


def _host(url: str) -> str | None:
    """Returns the host without its port: another port of a host is the same site. None if `url` is
    not valid or does not have a host (a sandboxed page's origin is "null")."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class ApiKeyGuard:
    """ASGI middleware that requires a key for all paths but `OPEN_PATHS`. Paths outside of the API
    show all models and clients, and require an operator's key."""

    def __init__(self, app: ASGIApp, keys: Callable[[], Sequence[ApiKey]]) -> None:
        self._app, self._keys = app, keys  # `keys` returns the current ones

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except RequestError as error:
            answer = respond(error, scope["path"])
            if error.status == 401 and not _is_api(scope["path"]):
                answer.headers["WWW-Authenticate"] = 'Basic realm="Prism"'
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        key = find_key(self._keys(), presented_key(Headers(scope=scope), scope["method"]))
        if key is None:
            raise UnauthorizedError(
                "the API key is missing or unknown; send the header Authorization: Bearer KEY"
            )
        if not _is_api(scope["path"]) and not key.operator:
            raise ForbiddenError("this path requires the key of an operator")
        if (call := calls.current.get()) is not None:
            call.key, call.api_key = key.name, key


def _is_api(path: str) -> bool:
    return path.startswith("/v1/") or path in _OUTSIDE_OF_V1


def presented_key(headers: Headers, method: str) -> str:
    """Returns the key of a request, also from Anthropic's header. A browser's password counts for
    reading alone: the browser sends it for the pages of any site."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    if kind.lower() == "basic" and method in _READING:
        return _password(key)
    return headers.get("x-api-key", "")


def _password(credentials: str) -> str:
    """Returns the password of HTTP basic credentials, which browsers send."""
    try:
        return b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def find_key(keys: Sequence[ApiKey], key: str) -> ApiKey | None:
    """Returns the known key that equals `key`, in a time that does not depend on the difference."""
    found, digest = None, hashed(key)
    for each in keys:
        if hmac.compare_digest(each.sha256, digest):
            found = each
    return found


def may_use(model: str) -> bool:
    """Returns whether the key of the current request allows the model."""
    call = calls.current.get()
    key = call.api_key if call else None
    return key is None or not key.models or model in key.models


class RateLimits:
    """Rate limits of API keys, counted in Redis for all frontends. For one event loop.

    A charge may be counted twice if the connection to Redis breaks meanwhile."""

    def __init__(self, queue: RequestQueue, queue_timeout_s: float) -> None:
        self._queue = queue
        self.queue_timeout_s = queue_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, key: ApiKey | None, prompt_tokens: int) -> None:
        """Charges a request. Raises RateLimitError with the time to retry, or QueueUnavailableError
        if Redis was unavailable for `frontend.queue_timeout`."""
        if key is None or not _is_limited(key):
            return
        take = partial(self._queue.take_rate, key.name, *_rates(key), prompt_tokens)
        wait_s = await retry_until_available(take, self.queue_timeout_s)
        if wait_s > 0:
            error = RateLimitError(
                f"the key {key.name} is limited to {_limits(key)}; try again in {wait_s:.1f} s"
            )
            error.retry_after_s = ceil(wait_s)
            raise error

    def give_back(self, key: ApiKey | None, prompt_tokens: int) -> None:
        """Refunds the charge of a request that was rejected after `begin`."""
        if key is not None and _is_limited(key):
            back = partial(self._queue.refund_rate, key.name, *_rates(key), prompt_tokens)
            self._spawn(self._count(key, back))

    def end(self, key: ApiKey | None, output_tokens: int) -> None:
        """Charges the generated tokens."""
        if key is not None and key.tokens_per_minute and output_tokens:
            owed = partial(self._queue.take_rate, key.name, *_rates(key), output_tokens)
            self._spawn(self._count(key, partial(owed, spent=True)))

    async def _count(self, key: ApiKey, change: Callable[[], Awaitable[object]]) -> None:
        try:
            await change()
        except QueueUnavailableError as error:
            log.warning("the rate of the key %s is not up to date: %s", key.name, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_limited(key: ApiKey) -> bool:
    return any(_rates(key))


def _rates(key: ApiKey) -> tuple[int, int]:
    return key.requests_per_minute, key.tokens_per_minute


def _limits(key: ApiKey) -> str:
    found = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
    return " and ".join(f"{n} {what}" for what, n in found.items() if n) + " per minute"
