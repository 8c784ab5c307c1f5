"""Passes requests for external models on to one of their servers, and the answers back unchanged.

Another server gets the request if one cannot be reached or is lost before its answer has begun. A
stream that has begun cannot continue elsewhere, since a stock server does not tell the tokens'
ids: it ends with an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator

import httpx
import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism.config.api_keys import server_headers
from prism.errors import RequestError
from prism.frontend.dispatch.rate_limits import RateLimits
from prism.frontend.external.servers import ExternalServers, OpenRequest, Server
from prism.frontend.http.calls import ID_HEADER, Call
from prism.frontend.http.error_bodies import (
    STATUS_CLIENT_GONE,
    GenerationError,
    UnavailableError,
    anthropic_error,
    error_body,
    respond,
)
from prism.frontend.http.in_flight import InFlight
from prism.frontend.metrics.request_metrics import Metrics, RequestTimer
from prism.frontend.protocol.bodies import memory, receive_body
from prism.frontend.requests.replies import finished_before_disconnect, sse
from prism.messages.external import ExternalModel

PATHS = frozenset(
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/rerank", "/v1/score"),
        *("/tokenize", "/detokenize"),
    ]
)
# Bytes of a body for each token of its prompt, about those of English.
_TOKEN_BYTES = 4
_NOT_NOW = (502, 503)
_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


class _Named(msgspec.Struct):
    model: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


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
                model = servers.find(_model_in(body))
                if model is not None:
                    await _Passage(state, model, body, scope, send).run(receive)
                    return
        except ClientDisconnect:
            await Response(status_code=STATUS_CLIENT_GONE)(scope, receive, send)
        except RequestError as error:
            await respond(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, _with_body(body, receive), send)


def _model_in(body: bytes) -> str:
    """Returns the model that a body names. Empty: none, or the body is not valid."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except msgspec.DecodeError:  # the route's own check has the message
        return ""


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that begins with a body that was received before."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


class _Passage:
    """One request on its way to a server, and its answer."""

    def __init__(
        self, state: State, model: ExternalModel, body: bytes, scope: Scope, send: Send
    ) -> None:
        self._servers: ExternalServers = state.external
        self._rates: RateLimits = state.rates
        self._in_flight: InFlight = state.in_flight
        self._metrics: Metrics = state.metrics
        self._model, self._body = model, body
        self._scope, self._send = scope, send
        self._call: Call = scope["state"]["call"]
        self._call.model = model.name
        self._call.prompt_tokens = len(body) // _TOKEN_BYTES
        self._timer = RequestTimer(
            self._metrics, model.name, model.slo_ttft_s, model.slo_tpot_s, choices=1
        )
        self._begun = False
        self._outcome = "ok"

    async def run(self, receive: Receive) -> None:
        """Answers the request. Raises RequestError if nothing has been sent."""
        call = self._call
        with self._in_flight.request():
            self._servers.check_room()
            await self._rates.begin(call.api_key, call.prompt_tokens)
            self._timer.begin(call.arrived_s, call.traceparent)
            try:
                if not await finished_before_disconnect(receive, self._answer()):
                    self._outcome = "cancelled"
            except RequestError as error:
                self._outcome = error.code
                if not self._begun:
                    raise
                await self._end_with(error)
            except BaseException:
                self._outcome = "failed"
                raise
            finally:
                self._timer.end(self._outcome, [])
                self._rates.end(call.api_key, call.output_tokens)
                self._metrics.count_key_usage(call)

    async def _answer(self) -> None:
        servers = self._servers.in_order(self._model)
        for place, server in enumerate(servers, 1):
            try:
                if await self._answered_by(server, is_last=place == len(servers)):
                    return
                problem = "answered that it is not available"
            except (httpx.TransportError, UnavailableError) as error:
                problem = str(error) or type(error).__name__
                server.failed_s, server.served_name = time.monotonic(), ""
                if self._begun or isinstance(error, httpx.ReadTimeout):
                    log.warning("%s of %s: %s", server.url, self._model.name, problem)
                    raise self._lost(error) from error
            log.warning("%s of %s: %s", server.url, self._model.name, problem)
        raise UnavailableError(
            f"no server of {self._model.name} answers; try again shortly", "model_unavailable"
        )

    def _lost(self, error: Exception) -> GenerationError:
        if isinstance(error, httpx.ReadTimeout):
            return GenerationError("timeout", f"the server of {self._model.name} sent nothing")
        message = f"the server of {self._model.name} was lost; send the request again"
        return GenerationError("server_lost", message)

    async def _answered_by(self, server: Server, *, is_last: bool) -> bool:
        """Passes the request on. Returns False if another server may answer it. Raises
        httpx.TransportError or UnavailableError."""
        query = self._scope["query_string"].decode("latin-1")
        url = f"{server.url}{self._scope['path']}{f'?{query}' if query else ''}"
        with self._servers.open(server, self._call.prompt_tokens) as opened:
            body = _renamed(self._body, await self._servers.served_name(server, self._model))
            headers = self._headers()
            asked = self._servers.client.stream("POST", url, content=body, headers=headers)
            async with asked as answer:
                if answer.status_code in _NOT_NOW and not is_last:
                    return False
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    await self._pass_stream(answer, opened)
                else:
                    await self._pass_whole(answer)
        return True

    def _headers(self) -> dict[str, str]:
        call = self._call
        trace = {"traceparent": call.traceparent} if call.traceparent else {}
        plain = {"content-type": "application/json", "accept-encoding": "identity"}
        return {**plain, ID_HEADER: call.id, **trace, **server_headers(self._model)}

    async def _pass_whole(self, answer: httpx.Response) -> None:
        whole = await answer.aread()
        self._count_usage(whole)
        if answer.status_code >= 400:
            client_error = answer.status_code < 500
            self._outcome = RequestError.code if client_error else UnavailableError("").code
        await self._start(answer)
        await self._send({"type": "http.response.body", "body": whole})

    def _count_usage(self, whole: bytes) -> None:
        try:
            usage = msgspec.json.decode(whole, type=_Answer).usage
        except msgspec.DecodeError:
            usage = None
        if usage is None:
            self._timer.vector_received()
            return
        self._call.prompt_tokens = usage.prompt_tokens
        self._timer.submitted(usage.prompt_tokens)
        self._count(usage.completion_tokens)

    def _count(self, tokens: int) -> None:
        self._timer.tokens(tokens)
        self._call.output_tokens += tokens

    async def _pass_stream(self, answer: httpx.Response, opened: OpenRequest) -> None:
        async for events in _whole_events(answer.aiter_raw()):
            if not self._begun:
                await self._start(answer)
            tokens = events.count(b"data:") - events.count(_DONE)
            opened.add(tokens)
            self._count(tokens)
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        if not self._begun:
            await self._start(answer)
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, answer: httpx.Response) -> None:
        self._begun = True
        named = ("content-type", "retry-after")
        headers = [(n.encode(), answer.headers[n].encode()) for n in named if n in answer.headers]
        start = {"status": answer.status_code, "headers": headers}
        await self._send({"type": "http.response.start", **start})

    async def _end_with(self, error: RequestError) -> None:
        """Ends a stream with an error in the shape of its API."""
        if self._scope["path"] == "/v1/messages":
            last = sse({**anthropic_error(error), "type": "error"}, named=True)
        else:
            last = sse(error_body(error)) + _DONE
        await self._send({"type": "http.response.body", "body": last})


def _renamed(body: bytes, name: str) -> bytes:
    """Returns a body with another model, and everything else as it is."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})


async def _whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the stream in parts that end with an event, so that an error can follow each."""
    rest = b""
    async for chunk in chunks:
        rest += chunk
        end = rest.rfind(_EVENT_END) + len(_EVENT_END)
        if end >= len(_EVENT_END):
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
