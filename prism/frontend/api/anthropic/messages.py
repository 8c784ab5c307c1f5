"""POST /v1/messages and /v1/messages/count_tokens: chat completions in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json

from prism.errors import BadRequestError, RequestError
from prism.frontend.api.anthropic.message_types import CountBody, MessagesBody, renamed
from prism.frontend.api.openai.chat import ChoiceRenderer, split_calls
from prism.frontend.http.errors import anthropic_error
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.requests.idempotency import AnyGeneration, read_key
from prism.frontend.requests.replies import (
    Event,
    Events,
    reply_stream,
    reply_whole,
    run_in_thread_if_slow,
)
from prism.frontend.requests.services import services
from prism.frontend.requests.specs import chat_spec, conversation_text

router = APIRouter(route_class=PlainRoute)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, MessagesBody)
    key = await read_key(request, body)
    try:
        spec = await chat_spec(found, body.chat)
    except BadRequestError as error:
        raise renamed(error) from error
    answer = _Answer(found.generation(spec, key))
    if body.stream:
        events = answer.events()
        return await reply_stream(request, found, answer.generation, events, named=True)
    return await reply_whole(request, found, answer.generation, answer.whole)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, CountBody)
    found.enter()
    try:
        model = found.model(body.model)
        tokenizer = found.tokenizer(model.name)
        text = await conversation_text(model, body.chat, tokenizer)
        [ids] = await tokenizer.encode([text], special_tokens=False)
        return JSONResponse({"input_tokens": len(ids)})
    finally:
        found.leave()


class _Answer:
    """Answer of one request, whole or as events."""

    def __init__(self, generation: AnyGeneration) -> None:
        self.generation = generation

    def whole(self) -> dict[str, Any]:
        [choice] = self.generation.choices
        ended, renderer = choice.so_far(), ChoiceRenderer(self.generation, 0)
        blocks = _Blocks()
        for delta in renderer.in_order(ended):
            for _ in blocks.take(delta):
                pass
        for _ in blocks.end():
            pass
        usage = self._usage()
        return self._message(
            blocks.content, usage=usage, **self._ending(renderer.finish_reason(ended))
        )

    async def events(self) -> Events:
        """Yields events in Anthropic's order."""
        blocks, renderer, reason = _Blocks(), ChoiceRenderer(self.generation, 0), None
        try:
            async for update in self.generation.updates():
                if not blocks.began:
                    # The number of cached tokens is known with the first token.
                    blocks.began = True
                    yield {"type": "message_start", "message": self._begun()}
                delta = await run_in_thread_if_slow(
                    partial(renderer.delta, update), self.generation.spec, len(update.token_ids)
                )
                for event in blocks.take(delta):
                    yield event
                reason = renderer.finish_reason(update)
        except RequestError as error:
            yield anthropic_error(error)
            raise
        for event in blocks.end():
            yield event
        ending = self._ending(reason)
        yield {"type": "message_delta", "delta": ending, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _begun(self) -> dict[str, Any]:
        usage = self._usage() | {"output_tokens": 0}
        return self._message([], usage=usage, stop_reason=None, stop_sequence=None)

    def _message(self, content: list[Event], **more: Any) -> dict[str, Any]:
        head = self.generation.head("message")
        fields = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}
        return {**fields, "content": content, **more}

    def _ending(self, reason: str | None) -> dict[str, Any]:
        stop = self.generation.choices[0].stop_string
        if stop is not None and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS[reason or "stop"], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        made = self.generation.usage()
        cached = made["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": made["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": made["completion_tokens"],
        }


class _Blocks:
    """Content of a message, built block by block, and its events. It takes deltas of a chat
    completion, or its whole message as one."""

    def __init__(self) -> None:
        self.content: list[Event] = []
        self.began = False
        self._open = ""  # type of the last block while it is open
        self._pieces: list[str] = []
        self._space = ""  # held back: it belongs to a text if one follows

    def take(self, delta: dict[str, Any]) -> Iterator[Event]:
        if reasoning := delta.get("reasoning_content"):
            yield from self._write("thinking", reasoning)
        continued, new = split_calls(delta)
        for call in continued:
            yield from self._call(call)
        if text := delta.get("content"):
            yield from self._text(text)
        for call in new:
            yield from self._call(call)

    def end(self) -> Iterator[Event]:
        """Closes the last block. Adds an empty text if none was written."""
        if not self.content:
            yield from self._write("text", self._space)
        yield from self._close()

    def _text(self, text: str) -> Iterator[Event]:
        """Writes text. Space before and between other blocks does not start a text block."""
        if self._open != "text" and not text.strip():
            self._space += text
            return
        before, self._space = self._space, ""
        yield from self._write("text", before + text)

    def _write(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            extra = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **extra})
        self._pieces.append(text)
        if text:
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            self._space = ""
            yield from self._begin(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            )
        self._pieces.append(function["arguments"])
        if function["arguments"]:
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _begin(self, block: Event) -> Iterator[Event]:
        yield from self._close()
        self.content.append(block)
        self._open, self._pieces = block["type"], []
        # A copy, since the block is filled later.
        yield {
            "type": "content_block_start",
            "index": len(self.content) - 1,
            "content_block": {**block},
        }

    def _close(self) -> Iterator[Event]:
        """Closes the last block."""
        if not self._open:
            return
        kind, text, block = self._open, "".join(self._pieces), self.content[-1]
        self._open = ""
        block["input" if kind == "tool_use" else kind] = (
            _arguments(text) if kind == "tool_use" else text
        )
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, delta: Event) -> Event:
        index = len(self.content) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}


def _arguments(text: str) -> Any:
    """Returns the arguments as an object, as far as they are complete in a truncated call."""
    try:
        made = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}
