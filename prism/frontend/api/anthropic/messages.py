"""POST /v1/messages and /v1/messages/count_tokens: chat completions in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json

from prism.errors import BadRequestError, RequestError
from prism.frontend.api.anthropic.message_types import CountBody, MessagesBody
from prism.frontend.api.openai.chat_parts import ChatParts, Kind
from prism.frontend.http.error_bodies import anthropic_error
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.requests.idempotency import AnyGeneration, SharedAnswers, read_key
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.frontend.requests.replies import (
    Event,
    Events,
    reply_stream,
    reply_whole,
    while_connected,
)
from prism.frontend.requests.specs import SpecBuilder

router = APIRouter(route_class=PlainRoute)

# Kind of a part -> its block, without the text or the call.
_BLOCKS: dict[Kind, Event] = {
    "call": {"type": "tool_use"},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    specs: SpecBuilder = request.app.state.specs
    answers: SharedAnswers = request.app.state.answers
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, MessagesBody)
    key = await read_key(request, body)
    with in_flight.request():
        try:
            spec = await while_connected(request, body, specs.chat(body.chat))
        except BadRequestError as error:
            raise body.renamed(error) from error
        answer = _Answer(answers.generation(spec, key))
        if body.stream:
            events = answer.events()
            return await reply_stream(request, answer.generation, events, named=True)
        return await reply_whole(request, answer.generation, answer.whole)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    in_flight: InFlight = request.app.state.in_flight
    catalog: ModelCatalog = request.app.state.catalog
    body = await read_body(request, CountBody)
    with in_flight.request():
        model, _ = catalog.resolve(body.model)
        specs: SpecBuilder = request.app.state.specs
        asked = specs.conversation(model, body.chat)
        _, ids, _ = await while_connected(request, body, asked)
        return JSONResponse({"input_tokens": len(ids)})


class _Answer:
    """Answer of one request, whole or as events."""

    def __init__(self, generation: AnyGeneration) -> None:
        self.generation = generation

    def whole(self) -> dict[str, Any]:
        blocks = _Blocks(self.generation)
        blocks.take_whole()
        return self._message(blocks.parts, usage=self._usage(), **self._ending(blocks))

    async def events(self) -> Events:
        """Yields events in Anthropic's order."""
        blocks, began = _Blocks(self.generation), False
        try:
            async for events in blocks.updates():
                if not began:
                    # The number of cached tokens is known with the first token.
                    began = True
                    yield {"type": "message_start", "message": self._begun()}
                for event in events:
                    yield event
        except RequestError as error:
            yield anthropic_error(error)
            raise
        yield {"type": "message_delta", "delta": self._ending(blocks), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _begun(self) -> dict[str, Any]:
        usage = self._usage() | {"output_tokens": 0}
        return self._message([], usage=usage, stop_reason=None, stop_sequence=None)

    def _message(self, content: list[Event], **more: Any) -> dict[str, Any]:
        head = self.generation.head("message")
        fields = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}
        return {**fields, "content": content, **more}

    def _ending(self, blocks: _Blocks) -> dict[str, Any]:
        stop, reason = self.generation.choices[0].stop_string, blocks.finish_reason
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


class _Blocks(ChatParts):
    """Content of a message, and its events."""

    def _begin(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        block = {**_BLOCKS[kind]}
        if call:
            block |= {"id": call["id"], "name": call["function"]["name"], "input": {}}
        self.parts.append(block)
        # A copy, since the block is filled later.
        yield self._event("start", content_block={**block})

    def _delta(self, kind: Kind, text: str) -> Event:
        if kind == "call":
            return self._event("delta", delta={"type": "input_json_delta", "partial_json": text})
        name = _BLOCKS[kind]["type"]
        return self._event("delta", delta={"type": f"{name}_delta", name: text})

    def _end(self, kind: Kind, text: str, cut: bool) -> Iterator[Event]:
        block = self.parts[-1]
        if kind == "call":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        yield self._event("stop")

    def _event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self.parts) - 1, **fields}


def _arguments(text: str) -> Any:
    """Returns the arguments as an object, as far as they are complete in a truncated call."""
    try:
        made = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}
