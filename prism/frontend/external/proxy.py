"""ASGI middleware that passes requests for external models on to their servers."""

from __future__ import annotations

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism.errors import QueueUnavailableError, RequestError
from prism.frontend.external.servers import ExternalServers
from prism.frontend.http.error_bodies import STATUS_CLIENT_GONE, queue_unavailable, respond
from prism.frontend.protocol.bodies import memory, parsed, receive_body

PATHS = frozenset(
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/rerank", "/v1/score"),
        *("/tokenize", "/detokenize"),
    ]
)


class _Named(msgspec.Struct):
    model: str = ""


class ExternalProxy:
    """ASGI middleware that answers requests for external models. All others reach `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        state: State = scope["app"].state
        servers: ExternalServers = state.external
        if not servers.models():
            await self._app(scope, receive, send)
            return
        try:
            with memory.share() as grow:
                body = await receive_body(Request(scope, receive), grow)
                model = servers.find(await parsed(_model_in, body))
                if model is not None:
                    # With httpx, which a frontend without external models does not need.
                    from prism.frontend.external.passage import Passage

                    await Passage(state, model, body, scope, send).run(receive)
                    return
        except ClientDisconnect:
            await Response(status_code=STATUS_CLIENT_GONE)(scope, receive, send)
        except QueueUnavailableError as error:
            await respond(queue_unavailable(error), scope["path"])(scope, receive, send)
        except RequestError as error:
            await respond(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, _with_body(body, receive), send)


def _model_in(body: bytes) -> str:
    """Returns the model that a body names. Empty: none, or the body is not valid."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # the route's own check has the message


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that begins with a body that was received before."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
