"""Who may ask what: API keys, their models and their rates."""

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
from prism.frontend.patience import patiently
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


class OtherSites:
    """ASGI middleware: a page of another site can have a browser read, and nothing else, unless
    `origins` (`frontend.cors_origins`) names the page's."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app, self._origins = app, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_refused(scope):
            refused = "a page of another site may not ask this; name it in frontend.cors_origins"
            await respond(ForbiddenError(refused))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        named = {"*", headers.get("origin")} & self._origins
        return scope["method"] not in _READING and not named and _is_foreign(headers)


def _is_foreign(headers: Headers) -> bool:
    """Returns whether a browser sends this for a page of another site. Browsers before 2023 do not
    send Sec-Fetch-Site, nor does any to a server without TLS on another machine. The page's host in
    Origin then has to be the server's own. Clients that are not browsers send neither header."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "cross-site"
    if (origin := headers.get("origin")) is None:
        return False
    page = _host(origin)
    return page is None or page != _host(f"//{headers.get('host', '')}")


def _host(url: str) -> str | None:
    """Without the port: another port of a host is the same site. None where the URL has no host,
    or is not one (a sandboxed page's is "null")."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class Guard:
    """ASGI middleware: nothing but `OPEN_PATHS` without a key. Paths that are no part of the API
    tell of all models and clients, and need an operator's."""

    def __init__(self, app: ASGIApp, keys: Callable[[], Sequence[ApiKey]]) -> None:
        """`keys`: those of now."""
        self._app, self._keys = app, keys

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
        key = find(self._keys(), presented(Headers(scope=scope), scope["method"]))
        if key is None:
            raise UnauthorizedError(
                "no API key, or an unknown one; send the header Authorization: Bearer KEY"
            )
        if not _is_api(scope["path"]) and not key.operator:
            raise ForbiddenError("this needs the key of an operator")
        if (call := calls.current.get()) is not None:
            call.key, call.api_key = key.name, key


def _is_api(path: str) -> bool:
    return path.startswith("/v1/") or path in _OUTSIDE_OF_V1


def presented(headers: Headers, method: str) -> str:
    """The key of a request, as Anthropic's clients send it, too. A browser's password is for
    reading alone: it sends it whichever page has it ask."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    if kind.lower() == "basic" and method in _READING:
        return _password(key)
    return headers.get("x-api-key", "")


def _password(credentials: str) -> str:
    """A browser's, for the pages of operators."""
    try:
        return b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def find(keys: Sequence[ApiKey], key: str) -> ApiKey | None:
    """In a time that does not tell how close a wrong key comes."""
    found, digest = None, hashed(key)
    for each in keys:
        if hmac.compare_digest(each.sha256, digest):
            found = each
    return found


def may_use(model: str) -> bool:
    """Whether the key of the present request allows the model."""
    call = calls.current.get()
    key = call.api_key if call else None
    return key is None or not key.models or model in key.models


class Rates:
    """The rates of keys, which Redis keeps for all frontends. For one event loop.

    What is counted while Redis breaks off may be counted twice."""

    def __init__(self, queue: RequestQueue, queue_timeout_s: float) -> None:
        self._queue = queue
        self.queue_timeout_s = queue_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, key: ApiKey | None, prompt_tokens: int) -> None:
        """Raises RateLimitError, which says when to try again, or QueueUnavailableError when Redis
        has been away for `frontend.queue_timeout`."""
        if key is None or not _is_limited(key):
            return
        take = partial(self._queue.take_rate, key.name, *_rates(key), prompt_tokens)
        wait_s = await patiently(take, self.queue_timeout_s)
        if wait_s > 0:
            error = RateLimitError(
                f"the key {key.name} has a limit of {_limits(key)}; try again in {wait_s:.1f} s"
            )
            error.retry_after_s = ceil(wait_s)
            raise error

    def give_back(self, key: ApiKey | None, prompt_tokens: int) -> None:
        """What `begin` took for a request that was refused after it."""
        if key is not None and _is_limited(key):
            back = partial(self._queue.give_rate_back, key.name, *_rates(key), prompt_tokens)
            self._spawn(self._count(key, back))

    def end(self, key: ApiKey | None, output_tokens: int) -> None:
        """What was generated is owed."""
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
    return " and ".join(f"{n} {what}" for what, n in found.items() if n) + " a minute"
