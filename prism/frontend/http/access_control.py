"""Access control: API keys, their models, and requests from other sites."""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from prism.config.schema.access import ApiKey, hashed
from prism.errors import RequestError
from prism.frontend.http import calls
from prism.frontend.http.error_bodies import respond

OPEN_PATHS = ("/", "/health", "/openapi.json", "/docs")
_OUTSIDE_OF_V1 = ("/tokenize", "/detokenize")  # where vLLM has them
_READING = ("GET", "HEAD", "OPTIONS")


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
