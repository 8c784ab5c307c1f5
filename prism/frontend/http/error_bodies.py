"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and in Anthropic's for
/v1/messages."""

from __future__ import annotations

import logging
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from prism.errors import BadRequestError, QueueUnavailableError, RequestError
from prism.frontend.http.calls import ID_HEADER

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
STATUS_CLIENT_GONE = 499
_RETRY_STATUSES = (429, 503)
# Closes the connection, since the rest of the body is not read.
_CLOSE_STATUSES = (401, 403, 408, 413)
# Failure codes of engines and agents that are caused by the request.
_CLIENT_CODES = ("context_length_exceeded", "invalid_request_error")


class BodyTooLargeError(RequestError):
    code = "request_too_large"
    status = 413


class BodyTimeoutError(RequestError):
    code = "request_timeout"
    status = 408


class OverloadedError(RequestError):
    """The frontend's limit on open requests is reached."""

    code = "frontend_full"
    status = 429


class SheddingError(OverloadedError):
    """Open requests for the model are late already (`frontend.shed`)."""

    code = "shed"


class RateLimitError(OverloadedError):
    """The API key's rate is used up."""

    code = "rate_limit_exceeded"


class UnavailableError(RequestError):
    """The request is valid, but the cluster cannot serve it now."""

    status = 503

    def __init__(self, message: str, code: str = "unavailable") -> None:
        super().__init__(message)
        self.code = code


class GenerationError(RequestError):
    """Generation began and could not be finished. `code` is set by the engine or agent."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = 400 if code in _CLIENT_CODES else 504 if code == "timeout" else 503


def bad_request(
    message: str, param: str | None = None, code: str = BadRequestError.code
) -> BadRequestError:
    error = BadRequestError(message)
    error.param, error.code = param, code
    return error


def error_body(error: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": _kind(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


# Status -> Anthropic's error type; api_error for all others.
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Returns the error in the shape of Anthropic's API."""
    kind = _ANTHROPIC.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: {error}"}}


def from_validation(error: ValidationError, kind: type[BaseModel]) -> BadRequestError:
    """Returns the first error of a body of this kind, with the path of the field."""
    errors = error.errors(include_url=False)
    first, at = errors[0], errors[0]["loc"]
    if at and _has_types(kind, at[0]):
        # There is an error for each type, which follows the field in `loc`; the deepest one is of
        # the type that the value is most like.
        first = max((e for e in errors if e["loc"][:1] == at[:1]), key=lambda e: len(e["loc"]))
        at = (at[0], *first["loc"][2:])
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in at).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{path}: {message}" if path else message, str(at[0]) if at else None)


def _has_types(kind: type[BaseModel], name: int | str) -> bool:
    """Returns whether a field has several types other than null."""
    field = kind.model_fields.get(str(name))
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return False
    return len([each for each in get_args(field.annotation) if each is not NoneType]) > 1


def install_handlers(app: FastAPI) -> None:
    """Installs handlers that answer every failure of `app` in the shape of its API."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(QueueUnavailableError, _on_queue_unavailable)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)


def respond(error: RequestError, path: str = "") -> JSONResponse:
    """Returns the error in the shape of the API that `path` belongs to."""
    headers: dict[str, str] = {}
    if error.status in _RETRY_STATUSES:
        headers["Retry-After"] = str(error.retry_after_s or RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in _CLOSE_STATUSES:
        headers["Connection"] = "close"
    made = anthropic_error(error) if path.startswith("/v1/messages") else error_body(error)
    return JSONResponse(made, error.status, headers)


def queue_unavailable(error: QueueUnavailableError) -> UnavailableError:
    log.warning("%s", error)
    message = "the request queue (Redis) cannot be reached; try again shortly"
    return UnavailableError(message, "queue_unavailable")


async def _on_request_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return respond(error, request.url.path)


async def _on_queue_unavailable(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, QueueUnavailableError)
    return respond(queue_unavailable(error), request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allow = _allowed(error)
    if allow and request.method == "OPTIONS":
        return Response(status_code=204, headers=allow)
    shown = RequestError(f"{error.detail}: {request.method} {request.url.path}")
    shown.status = error.status_code
    shown.code = "not_found" if error.status_code == 404 else "invalid_request_error"
    answer = respond(shown, request.url.path)
    answer.headers.update(allow)
    return answer


def _allowed(error: HTTPException) -> dict[str, str]:
    """Returns the header with the methods of the path, if it has any."""
    methods = (error.headers or {}).get("Allow", "").split(", ")
    heads = ["HEAD"] if "GET" in methods and "HEAD" not in methods else []
    return {"Allow": ", ".join([*sorted(methods), *heads, "OPTIONS"])} if methods[0] else {}


async def _on_client_gone(_: Request, _error: Exception) -> Response:
    """Returns a placeholder: the client disconnected before its body was complete."""
    return Response(status_code=STATUS_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    call_id = request.state.call.id
    log.error("%s %s failed (%s)", request.method, request.url.path, call_id, exc_info=error)
    shown = RequestError("internal error; the frontend's log has the details")
    shown.status, shown.code = 500, "internal_error"
    answer = respond(shown, request.url.path)
    answer.headers[ID_HEADER] = call_id
    return answer


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status in (401, 403):
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
