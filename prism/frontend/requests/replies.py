"""Sends a generation to its client: as one JSON body, or as server-sent events.

Both watch the connection: if the client disconnects, the generation is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from prism.errors import RequestError
from prism.frontend.http.error_bodies import STATUS_CLIENT_GONE, error_body
from prism.frontend.http.in_flight import InFlight
from prism.frontend.protocol.openai_types import RequestBody, StreamOptions
from prism.frontend.requests.generation import GenerationSpec, TextUpdate
from prism.frontend.requests.idempotency import AnyGeneration

Made = TypeVar("Made")
Event = dict[str, Any]  # in OpenAI's shape
Events = AsyncGenerator[Event, None]
# Tokens and log probabilities that are rendered in less time than handing them to a thread takes.
_INLINE_TOKENS_MAX = 4096
_PARSED_TOKENS_MAX = 256  # the same for tokens that are parsed
_DONE = b"data: [DONE]\n\n"


def sse(event: Event, named: bool = False) -> bytes:
    name = f"event: {event['type']}\n".encode() if named else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


async def reply_whole(
    request: Request,
    generation: AnyGeneration,
    render: Callable[[], dict[str, Any]],
) -> Response:
    """Waits for all output and returns the answer from `render`. REQUIRES: the request is counted
    as in flight."""
    outcome: str | None = "failed"
    try:
        complete = await finished_before_disconnect(request.receive, _run(generation))
        outcome = None
        if not complete:
            return Response(status_code=STATUS_CLIENT_GONE)
        spec, tokens = generation.spec, _tokens_shown(generation)
        content = await run_in_thread_if_slow(lambda: msgspec.json.encode(render()), spec, tokens)
        return Response(content, media_type="application/json")
    except RequestError as error:
        outcome = error.code
        raise
    finally:
        generation.finish(outcome)


async def while_connected(
    request: Request, body: RequestBody, work: Coroutine[Any, Any, Made]
) -> Made:
    """Returns the result of `work`, which takes long for a body with images: if the client
    disconnects meanwhile, cancels it and raises ClientDisconnect."""
    if not body.image_urls:
        return await work
    made: list[Made] = []

    async def run() -> None:
        made.append(await work)

    if not await finished_before_disconnect(request.receive, run()):
        raise ClientDisconnect
    return made[0]


async def run_in_thread_if_slow(
    make: Callable[[], Made], spec: GenerationSpec, tokens: int
) -> Made:
    """Returns the result of `make`, which renders so many tokens. It runs in a thread if it is
    slow, since the event loop's heartbeat keeps all requests alive."""
    if not _is_quick(spec, tokens):
        return await asyncio.to_thread(make)
    if spec.parsing is not None:
        await asyncio.sleep(0)  # yields to other tasks between two choices
    return make()


def _is_quick(spec: GenerationSpec, tokens: int) -> bool:
    """Returns whether few of the tokens are parsed, have log probabilities, or are values of
    vectors."""
    if spec.parsing is not None and tokens > _PARSED_TOKENS_MAX:
        return False
    if spec.logprobs is None and not spec.embeds:
        return True
    return tokens * (1 + (spec.logprobs or 0)) <= _INLINE_TOKENS_MAX


def _tokens_shown(generation: AnyGeneration) -> int:
    tokens = sum(len(choice.token_ids) for choice in generation.choices)
    tokens += sum(len(choice.embedding) // 4 for choice in generation.choices)
    prompts = generation.spec.requests if generation.spec.echoes else []
    return tokens + sum(len(request.prompt_ids) for request in prompts)


async def _run(generation: AnyGeneration) -> None:
    await generation.start()
    async for _ in generation.updates():
        pass


async def finished_before_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` in this task, since a separate one would double the cost. Returns False if it was
    cancelled because the client disconnected."""
    this, watching, interrupted = asyncio.current_task(), True, False
    assert this is not None

    def interrupt(_: asyncio.Task[None]) -> None:
        nonlocal interrupted
        interrupted = watching and this.cancel()

    gone = asyncio.create_task(_disconnected(receive))
    gone.add_done_callback(interrupt)
    try:
        await work
    except asyncio.CancelledError:
        # This task may have been cancelled for another reason too.
        if not interrupted or this.uncancel() > 0:
            raise
        return False
    finally:
        watching = False
        gone.cancel()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Response of server-sent events. However it ends, `events` is closed and the generation
    finished. `named`: each event has its type as its name, and `events` contain errors and the end
    of the stream."""

    media_type = "text/event-stream"

    def __init__(
        self, in_flight: InFlight, generation: AnyGeneration, events: Events, named: bool
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._in_flight = in_flight
        self._generation = generation
        self._events, self._named = events, named
        self._outcome: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(OSError):
                await finished_before_disconnect(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            self._generation.finish(self._outcome)
            self._in_flight.leave()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        try:
            async for event in self._events:
                await send(_part(sse(event, self._named)))
        except RequestError as error:
            self._outcome = error.code
            if not self._named:
                await send(_part(sse(error_body(error))))
        await send(_part(b"" if self._named else _DONE, more=False))


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def reply_stream(
    request: Request, generation: AnyGeneration, events: Events, named: bool = False
) -> Response:
    """Enqueues the request, so that a rejection has its HTTP status, and returns the stream.
    REQUIRES: the request is counted as in flight."""
    in_flight: InFlight = request.app.state.in_flight
    in_flight.enter()
    try:
        if not await finished_before_disconnect(request.receive, generation.start()):
            generation.finish()
            in_flight.leave()
            return Response(status_code=STATUS_CLIENT_GONE)
    except BaseException as error:
        generation.finish(error.code if isinstance(error, RequestError) else "failed")
        in_flight.leave()
        raise
    return EventStream(in_flight, generation, events, named)


class ShownChoices(Protocol):
    """Choices of a started generation in the shape of one route. Each item is `choices[0]` of one
    event."""

    begin: list[Event]  # sent before any output

    def show(self, update: TextUpdate) -> list[Event]: ...


async def openai_events(
    generation: AnyGeneration,
    kind: str,
    choices: Callable[[], ShownChoices],
    options: StreamOptions | None,
) -> Events:
    """Yields OpenAI's events. If usage is included, every event has a null or the counts so far as
    `usage`, and a last event has the counts."""
    shown, head, spec = choices(), generation.head(kind), generation.spec
    asked = options or StreamOptions()
    usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
    for choice in shown.begin:
        yield {**head, "choices": [choice], **usage}
    echoed = max(len(request.prompt_ids) for request in spec.requests) if spec.echoes else 0
    async for update in generation.updates():
        new = await run_in_thread_if_slow(
            partial(shown.show, update), spec, echoed + len(update.token_ids)
        )
        if usage and asked.continuous_usage_stats:
            usage = {"usage": generation.usage()}
        for choice in new:
            yield {**head, "choices": [choice], **usage}
    if usage:
        yield {**head, "choices": [], "usage": generation.usage()}
