"""One request for an external model, and its answer.

Another server gets the request if one cannot be reached or is lost before its answer has begun. A
stream that has begun cannot continue elsewhere, since a stock server does not tell the tokens'
ids: it ends with an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial

import httpx
import msgspec
from starlette.datastructures import Headers, State
from starlette.types import Receive, Scope, Send

from prism.errors import RequestError
from prism.frontend.dispatch.rate_limits import RateLimits
from prism.frontend.external.entrances import AsleepError, QueueTimeoutError
from prism.frontend.external.servers import ExternalServers, SentRequest, Server
from prism.frontend.http.calls import ID_HEADER, Call
from prism.frontend.http.error_bodies import (
    GenerationError,
    UnavailableError,
    anthropic_error,
    error_body,
)
from prism.frontend.http.in_flight import InFlight
from prism.frontend.metrics.request_metrics import Metrics, RequestTimer
from prism.frontend.protocol.bodies import check_counts, parsed
from prism.frontend.requests.replies import finished_before_disconnect, sse
from prism.messages.external import ExternalModel, ModelCard

_NOT_NOW = (502, 503)
_NOT_FOUND = 404
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, UnavailableError)
_PASSED_ON = ("traceparent", "anthropic-version", "anthropic-beta")
_RETURNED = ("content-type", "content-encoding", "retry-after", "location")
_WHOLE_BYTES_MAX = 64 << 20
_EVENT_BYTES_MAX = 1 << 20
_END_OF_STREAM = b"data: [DONE]"
_DONE = _END_OF_STREAM + b"\n\n"

log = logging.getLogger(__name__)


class _Usage(msgspec.Struct):
    """Usage in the words of OpenAI, or of its responses and Anthropic."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class Passage:
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
        self._call.prompt_tokens = self._servers.prompt_tokens(model, len(body))
        self._timer = RequestTimer(
            self._metrics, model.name, model.slo_ttft_s, model.slo_tpot_s, choices=1
        )
        self._begun = False
        self._outcome = "ok"

    async def run(self, receive: Receive) -> None:
        """Answers the request. Raises RequestError if nothing has been sent."""
        call, charged = self._call, self._call.prompt_tokens
        with self._in_flight.request(), self._servers.admitted(self._model):
            await self._rates.begin(call.api_key, charged)
            self._timer.begin(call.arrived_s, call.traceparent)
            try:
                if not await finished_before_disconnect(receive, self._answer()):
                    self._outcome = "cancelled"
            except RequestError as error:
                self._outcome = error.code
                if not self._begun:
                    self._rates.give_back(call.api_key, charged)
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
        """Tries the servers in order, and the first one again. A request that was lost with a
        server is sent once more at most, since it may be what ended the server."""
        check_counts(self._body)
        servers, lost = self._servers.in_order(self._model), False
        for attempt, server in enumerate([*servers, servers[0]], 1):
            others_left = attempt < len(servers)
            try:
                is_last = attempt > len(servers)
                if await self._answered_by(server, is_last=is_last, waits=not others_left):
                    return
                raise UnavailableError("answered that it is not available")
            except (httpx.HTTPError, UnavailableError) as error:
                server.fail()
                problem = str(error) or type(error).__name__
                log.warning("%s of %s: %s", server.url, self._model.name, problem)
                if self._begun or self._is_final(error, lost):
                    raise self._lost(error) from error
                if isinstance(error, QueueTimeoutError) or (
                    isinstance(error, AsleepError) and not others_left
                ):
                    raise
                lost = lost or not isinstance(error, _NOT_SENT)
        raise UnavailableError(
            f"no server of {self._model.name} answers; try again shortly", "model_unavailable"
        )

    def _is_final(self, error: Exception, lost: bool) -> bool:
        if isinstance(error, _NOT_SENT):
            return False
        return lost or isinstance(error, httpx.ReadTimeout)

    def _lost(self, error: Exception) -> GenerationError:
        if isinstance(error, httpx.ReadTimeout):
            return GenerationError("timeout", f"the server of {self._model.name} sent nothing")
        message = f"the server of {self._model.name} was lost; send the request again"
        return GenerationError("server_lost", message)

    async def _answered_by(self, server: Server, *, is_last: bool, waits: bool) -> bool:
        """Passes the request on, when the server is awake. Returns False if another server may
        answer it. Raises httpx.HTTPError or UnavailableError."""
        entrances = self._servers.entrances
        with closing(SentRequest(server, self._call.prompt_tokens)) as sent:
            async with entrances.entered(server.url, self._model, is_last=waits):
                return await self._sent_to(server, sent, is_last=is_last)

    async def _sent_to(self, server: Server, sent: SentRequest, *, is_last: bool) -> bool:
        query = self._scope["query_string"].decode("latin-1")
        url = f"{server.url}{self._scope['path']}{f'?{query}' if query else ''}"
        card = await self._card(server)
        sent.limit(card.max_model_len)
        body = await parsed(partial(_renamed, name=card.id), self._body)
        async with self._servers.stream(url, body, self._headers()) as answer:
            if answer.status_code in _NOT_NOW and not is_last:
                return False
            if answer.status_code == _NOT_FOUND:
                server.card = None  # it may have another model now
            if answer.status_code >= 400:
                is_clients = answer.status_code < 500
                self._outcome = RequestError.code if is_clients else "unavailable"
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_stream(answer, sent)
            else:
                await self._pass_whole(answer)
        return True

    async def _card(self, server: Server) -> ModelCard:
        try:
            return await self._servers.card(server, self._model)
        except httpx.HTTPError as error:  # the request itself was not sent
            raise UnavailableError(str(error) or type(error).__name__) from error

    def _headers(self) -> dict[str, str]:
        sent = {"content-type": "application/json", "accept-encoding": "identity"}
        sent |= {ID_HEADER: self._call.id, **self._servers.headers(self._model)}
        given = Headers(scope=self._scope)
        return sent | {n: given[n] for n in _PASSED_ON if given.get(n, "").isascii() and n in given}

    async def _pass_whole(self, answer: httpx.Response) -> None:
        whole = bytearray()
        async for part in answer.aiter_raw():
            whole += part
            if len(whole) > _WHOLE_BYTES_MAX:
                message = f"the answer has more than {_WHOLE_BYTES_MAX >> 20} MiB"
                raise GenerationError("answer_too_large", message)
        if answer.status_code < 400:
            self._count_usage(bytes(whole))
        await self._start(answer)
        await self._send({"type": "http.response.body", "body": bytes(whole)})

    def _count_usage(self, whole: bytes) -> None:
        try:
            usage = msgspec.json.decode(whole, type=_Answer).usage or _Usage()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            usage = _Usage()
        if prompt := usage.prompt_tokens or usage.input_tokens:
            self._call.prompt_tokens = prompt
            self._timer.submitted(prompt)
        self._call.output_tokens = usage.completion_tokens or usage.output_tokens
        self._timer.whole(self._call.output_tokens)

    async def _pass_stream(self, answer: httpx.Response, sent: SentRequest) -> None:
        async for events in _whole_events(answer.aiter_raw()):
            if not self._begun:
                await self._start(answer)
            tokens = _events_in(events)
            sent.add(tokens)
            self._timer.tokens(tokens)
            self._call.output_tokens += tokens
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        if not self._begun:
            await self._start(answer)
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, answer: httpx.Response) -> None:
        self._begun = True
        headers = [
            (n.encode(), answer.headers[n].encode()) for n in _RETURNED if n in answer.headers
        ]
        start = {"status": answer.status_code, "headers": headers}
        await self._send({"type": "http.response.start", **start})

    async def _end_with(self, error: RequestError) -> None:
        """Ends a stream with an error in the shape of its API."""
        path = self._scope["path"]
        if path == "/v1/messages":
            last = sse({**anthropic_error(error), "type": "error"}, named=True)
        elif path == "/v1/responses":
            event = {"type": "error", "code": error.code, "message": str(error), "param": None}
            last = sse(event, named=True)
        else:
            last = sse(error_body(error)) + _DONE
        await self._send({"type": "http.response.body", "body": last})


def _renamed(body: bytes, name: str) -> bytes:
    """Returns a body with another model, and everything else as it is."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})


def _events_in(events: bytes) -> int:
    """Returns the number of events with output."""
    begin = events.startswith(b"data:")
    return max(0, begin + events.count(b"\ndata:") - events.count(_END_OF_STREAM))


async def _whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the stream in parts that end with an event, so that an error can follow each. A longer
    event than _EVENT_BYTES_MAX is not whole."""
    rest = bytearray()
    async for chunk in chunks:
        seen = max(0, len(rest) - 3)
        rest += chunk
        end = max(rest.rfind(b"\n\n", seen) + 2, rest.rfind(b"\r\n\r\n", seen) + 4)
        if end < 4 and len(rest) > _EVENT_BYTES_MAX:
            end = len(rest)
        if end >= 4:
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)
