"""Client of a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from prism.errors import ConfigError
from prism.messages.cluster import ClusterStatus
from prism_replay.results import RequestRecord
from prism_replay.trace import TraceRequest

UNIX = "unix:"
"""Start of a `--status-url` that is the path of a Unix socket."""


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]


class ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class StreamChoice(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def carries_token(self) -> bool:
        """True if the choice has a token. Without ids, empty text may be part of a character."""
        if self.token_ids is not None:
            return bool(self.token_ids)
        return bool(self.text) or self.finish_reason is None


class StreamUsage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class StreamEvent(msgspec.Struct, frozen=True):
    """Event of a streamed completion (one `data:` line), or the body of an error response."""

    id: str | None = None
    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: ErrorBody | None = None


@dataclass
class Stream:
    """State of one response while it arrives. Times are from time.monotonic()."""

    first_s: float | None = None
    """Time of the first token."""
    last_s: float | None = None
    """Time of the last token."""
    events: int = 0
    """Number of events with a token."""
    ids: int = 0
    """Number of token ids."""
    usage_tokens: int | None = None
    """Output tokens by the server's count."""
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""
    response_id: str | None = None

    @property
    def tokens(self) -> int:
        """Number of output tokens: of token ids, or else by the server, or else of events."""
        return self.ids or self.usage_tokens or self.events

    @property
    def tpot_ms(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return _ms((self.last_s - self.first_s) / (self.tokens - 1))

    def take(self, event: StreamEvent, now_s: float) -> None:
        self.response_id = self.response_id or event.id
        if event.error:
            self.fail(error_code(event.error, "server_error"), event.error.message)
        if event.usage:
            self.usage_tokens = event.usage.completion_tokens
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.carries_token:
                self.first_s = self.first_s if self.first_s is not None else now_s
                self.last_s = now_s
                self.events += 1
                self.ids += len(choice.token_ids or ())

    def fail(self, code: str, message: str) -> None:
        self.error, self.message = self.error or code, self.message or message

    def check_complete(self, expected_tokens: int) -> None:
        """Records an error if the response is incomplete and does not have one."""
        if self.error is None and self.finish_reason is None:
            self.fail("truncated", "the stream ended without a finish reason")
        if self.finish_reason == "length" and self.tokens < expected_tokens:
            self.fail("short", f"{self.tokens} of {expected_tokens} tokens")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Server with OpenAI's API."""

    url: str
    api_key: str = field(default="", repr=False)
    """Empty: none."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's, in PEM format."""


@dataclass
class Sender:
    """Sender of concurrent completion requests. Used on one event loop only."""

    http: httpx.AsyncClient
    timeout_s: float
    start_s: float = field(default_factory=time.monotonic)
    """The replay's zero on time.monotonic()."""
    slo_scale: float = 1.0
    """Factor on the SLOs that the server gets. Records have the SLOs without it. 0: it gets neither
    SLOs nor priorities, which other servers than Prism may reject."""

    async def send(
        self, index: int, request: TraceRequest, prompt: str | list[int]
    ) -> RequestRecord:
        """Sends one request and reads the whole response.

        The record has the error of a failed request, and "interrupted" if the task is cancelled.
        """
        sent_s, stream = time.monotonic(), Stream()
        await self.receive(request, prompt, stream)
        return self._record(index, request, sent_s, stream)

    async def receive(self, request: TraceRequest, prompt: str | list[int], stream: Stream) -> None:
        """Sends one request and collects the response or the error in `stream`."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._read(self.body(request, prompt), stream)
            stream.check_complete(request.output_length)
        except TimeoutError:
            stream.fail("timeout", f"no complete response in {self.timeout_s:g} s")
        except (httpx.HTTPError, httpx.StreamError) as error:
            stream.fail("connection", f"{type(error).__name__}: {error}")
        except msgspec.DecodeError as error:
            stream.fail("bad_answer", f"the response is not in OpenAI's stream format: {error}")
        except asyncio.CancelledError:
            stream.fail("interrupted", "the replay was interrupted")

    async def _read(self, body: bytes, stream: Stream) -> None:
        headers = {"content-type": "application/json"}
        async with self.http.stream(
            "POST", "/v1/completions", content=body, headers=headers
        ) as answer:
            if answer.status_code != 200:
                error = decode_error(await answer.aread())
                stream.fail(error_code(error, f"http_{answer.status_code}"), error.message)
                return
            async for line in lines_of(answer.aiter_bytes()):
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    event = msgspec.json.decode(line[5:], type=StreamEvent)
                    stream.take(event, time.monotonic())

    def body(self, request: TraceRequest, prompt: str | list[int]) -> bytes:
        """Returns a greedy request for exactly `output_length` tokens.

        The server must support `ignore_eos`. The body includes the scaled SLOs and the priority, so
        that a server that schedules by deadline (Prism §6.3) has the SLOs that the replay measures.
        """
        body: dict[str, Any] = {
            "model": request.model,
            "prompt": prompt,
            "max_tokens": request.output_length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.slo_scale:
            slos = {"slo_ttft_ms": request.slo_ttft_ms, "slo_tpot_ms": request.slo_tpot_ms}
            body |= {name: ms * self.slo_scale for name, ms in slos.items() if ms is not None}
            body |= {"priority": request.priority} if request.priority else {}
        return msgspec.json.encode(body)

    def _record(
        self, index: int, request: TraceRequest, sent_s: float, stream: Stream
    ) -> RequestRecord:
        due_s = self.start_s + request.arrival_s
        first_s, last_s = stream.first_s, stream.last_s
        failed_ms = None if stream.error is None else _ms(time.monotonic() - due_s)
        return RequestRecord(
            index=index,
            model=request.model,
            arrival_s=request.arrival_s,
            send_lag_ms=_ms(sent_s - due_s),
            input_tokens=request.input_length,
            expected_tokens=request.output_length,
            output_tokens=stream.tokens,
            ttft_ms=None if first_s is None else _ms(first_s - due_s),
            tpot_ms=stream.tpot_ms,
            e2e_ms=None if last_s is None else _ms(last_s - due_s),
            failed_ms=failed_ms,
            slo_ttft_ms=request.slo_ttft_ms,
            slo_tpot_ms=request.slo_tpot_ms,
            slo_e2e_ms=request.slo_e2e_ms,
            priority=request.priority,
            error=stream.error,
            message=stream.message,
            response_id=stream.response_id,
        )


async def lines_of(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yields the lines of an event stream.

    httpx would also split at Unicode's line separators, which JSON permits in strings.
    """
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    yield rest


def decode_error(body: bytes) -> ErrorBody:
    """Returns the OpenAI error object of a response, or one with the body's text."""
    try:
        found = msgspec.json.decode(body, type=StreamEvent).error
    except msgspec.DecodeError:
        found = None
    return found or ErrorBody(message=body[:200].decode(errors="replace"))


def error_code(error: ErrorBody, default: str) -> str:
    return str(error.code or error.type or default)


def parse_url(text: str, option: str = "--url") -> str:
    """Returns the URL of a server without the path `/v1`. Raises ConfigError that names the
    option."""
    hint = f"http://{text}" if "://" not in text else "http://HOST:PORT"
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx.URL(text)
    except (ValueError, httpx.InvalidURL):  # of a port, an IPv6 address or a name
        is_whole = False
    if not is_whole:
        raise ConfigError(f"{option} {text}: is not a URL with http:// or https://; give {hint}")
    return text.rstrip("/").removesuffix("/v1")


def parse_status_url(text: str) -> str:
    """Returns the address of /status: a URL without that path, `unix:` and the path of a socket, or
    "" for none. Raises ConfigError."""
    if not text:
        return ""
    if text.startswith(UNIX):
        path = os.path.expanduser(text.removeprefix(UNIX))
        if not path:
            raise ConfigError(f"--status-url {text}: does not have a path; give {UNIX}PATH")
        return f"{UNIX}{path}"
    try:
        return parse_url(text, "--status-url").removesuffix("/status")
    except ConfigError as error:
        raise ConfigError(f"{error}, or {UNIX}PATH for a Unix socket") from error


def connect(endpoint: Endpoint) -> httpx.AsyncClient:
    """Returns a client without a limit on concurrent streams. The caller closes it. Raises
    ConfigError."""
    key = endpoint.api_key
    return httpx.AsyncClient(
        base_url=endpoint.url,
        timeout=httpx.Timeout(None, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        headers={"authorization": f"Bearer {key}"} if key else None,
        verify=_trusted(endpoint.ca_file),
        trust_env=False,
    )


def connect_status(endpoint: Endpoint, status_url: str) -> httpx.AsyncClient:
    """Returns a client of another address of /status (`parse_status_url`), with the key and the
    certificates of `endpoint`. A Unix socket needs neither. The caller closes it. Raises
    ConfigError."""
    if not status_url.startswith(UNIX):
        return connect(replace(endpoint, url=status_url))
    socket = httpx.AsyncHTTPTransport(uds=status_url.removeprefix(UNIX))
    return httpx.AsyncClient(base_url="http://localhost", transport=socket, trust_env=False)


def _trusted(ca_file: Path | None) -> ssl.SSLContext:
    """Returns a context that trusts a file's certificates, which need no issuer."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"--cacert {ca_file}: no certificates can be read ({error.strerror or error}); give a"
            " file in PEM format"
        ) from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


async def served_models(http: httpx.AsyncClient) -> dict[str, ModelCard]:
    """Returns the server's models by name. Raises ConfigError if it does not list them."""
    where = f"--url {http.base_url}"
    try:
        answer = await http.get("/v1/models", timeout=10.0)
        if answer.status_code in (401, 403):
            raise ConfigError(f"{where}: {_key_problem(answer)}")
        answer.raise_for_status()
        cards = msgspec.json.decode(answer.content, type=ModelList).data
    except httpx.TransportError as error:
        message = _no_response(error, "start one with `prism-serve`")
        raise ConfigError(f"{where}: {message}") from error
    except (httpx.HTTPStatusError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{where}: the response to GET /v1/models is not in OpenAI's format:"
            f" {str(error).splitlines()[0]}"  # httpx adds a link to a description of the status
        ) from error
    return {card.id: card for card in cards}


async def cluster_status(http: httpx.AsyncClient) -> ClusterStatus | None:
    """Returns the server's status; None if it has none (not Prism, or not ready)."""
    found = await read_status(http)
    return None if isinstance(found, str) else found


async def read_status(http: httpx.AsyncClient) -> ClusterStatus | str:
    """Returns the server's status, or the reason why it cannot be read."""
    try:
        answer = await http.get("/status", timeout=5.0)
        if answer.status_code in (401, 403):
            return _key_problem(answer, "give an operator's with")
        if answer.status_code != 200:
            return f"the response to GET /status has status {answer.status_code}"
        return msgspec.json.decode(answer.content, type=ClusterStatus)
    except httpx.HTTPError as error:
        return _no_response(error, "give the address of frontend.admin")
    except msgspec.DecodeError as error:
        return f"the response to GET /status is not in Prism's format: {error}"


def _key_problem(answer: httpx.Response, remedy: str = "") -> str:
    """Returns whether the key is missing or wrong, and the remedy."""
    if "authorization" in answer.request.headers:
        problem, remedy = "did not accept the API key", remedy or "give another one with"
    else:
        problem, remedy = "requires an API key", remedy or "give it with"
    where = "--api-key or in $OPENAI_API_KEY"
    return f"the server {problem} (status {answer.status_code}); {remedy} {where}"


def _no_response(error: httpx.HTTPError, remedy: str) -> str:
    """Returns what is wrong and the remedy, which is another one for certificates."""
    reason = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY" in reason:
        remedy = "give its certificate with --cacert, and a name that the certificate has"
    return f"no server responds ({reason}); {remedy}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
