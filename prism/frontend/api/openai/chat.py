"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec.structs import replace

from prism.frontend.api.openai.logprobs import chat_logprobs
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.protocol.chat_types import ChatBody
from prism.frontend.requests.generation import TextUpdate
from prism.frontend.requests.idempotency import AnyGeneration, SharedAnswers, read_key
from prism.frontend.requests.replies import (
    Event,
    openai_events,
    reply_stream,
    reply_whole,
    while_connected,
)
from prism.frontend.requests.specs import SpecBuilder
from prism.messages.requests import Logprobs

router = APIRouter(route_class=PlainRoute)

_DELTA_CHARS = 4  # about those of a token


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    specs: SpecBuilder = request.app.state.specs
    answers: SharedAnswers = request.app.state.answers
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, ChatBody)
    key = await read_key(request, body)
    with in_flight.request():
        spec = await while_connected(request, body, specs.chat(body))
        generation = answers.generation(spec, key)
        if body.stream:
            kind, choices = "chat.completion.chunk", partial(_Choices, generation)
            events = openai_events(generation, kind, choices, body.stream_options)
            return await reply_stream(request, generation, events)
        return await reply_whole(request, generation, lambda: _whole(generation))


class _Choices:
    """`ShownChoices` of chat completions."""

    def __init__(self, generation: AnyGeneration) -> None:
        self._generation = generation
        numbers = range(len(generation.choices))
        role = {"role": "assistant", "content": ""}
        self.begin: list[Event] = [
            {"index": number, "delta": role, "finish_reason": None} for number in numbers
        ]
        self._renderers = [ChoiceRenderer(generation, number) for number in numbers]

    def show(self, update: TextUpdate) -> list[Event]:
        renderer = self._renderers[update.choice]
        delta = {"delta": renderer.delta(update)}
        reason = renderer.finish_reason(update)
        return [_choice(update, delta, reason, self._generation)]


class ChoiceRenderer:
    """Renderer that splits a choice into reasoning, content and tool calls, if the model has
    parsers."""

    def __init__(self, generation: AnyGeneration, choice: int) -> None:
        self._parsing = generation.spec.parsing
        self._name = f"{generation.spec.id}-{choice}"
        self._begin()

    def _begin(self) -> None:
        self._parser = self._parsing.parser() if self._parsing else None
        self._calls = 0

    def delta(self, update: TextUpdate) -> dict[str, Any]:
        if self._parser is None:
            return {"content": update.text}
        piece = self._parser.push(update.text, last=update.finish_reason is not None)
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [self._call(*call) for call in piece.calls]
        return delta

    def message(self, update: TextUpdate) -> dict[str, Any]:
        """Returns the whole choice as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": update.text, "refusal": None}
        if self._parser is None:
            return message
        piece = self._parser.whole(update.text, cut=update.finish_reason == "length")
        message["content"] = piece.text if piece.text or not piece.calls else None
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            calls = [self._call(*call) for call in piece.calls]
            message["tool_calls"] = [{k: c[k] for k in ("id", "type", "function")} for c in calls]
        return message

    def in_order(self, update: TextUpdate) -> list[dict[str, Any]]:
        """Returns the whole choice as a message, or as a stream's deltas if text follows a call. A
        message does not have that order, and deltas take a hundred times as long."""
        message = self.message(update)
        text, words = update.text, (message["content"] or "").split()
        if "tool_calls" not in message or not words or not text.rstrip().endswith(words[-1]):
            return [message]
        self._begin()
        *before, last = [text[i : i + _DELTA_CHARS] for i in range(0, len(text), _DELTA_CHARS)]
        deltas = [self.delta(replace(update, text=t, finish_reason=None)) for t in before]
        return [*deltas, self.delta(replace(update, text=last))]

    def finish_reason(self, update: TextUpdate) -> str | None:
        calls = self._calls and update.finish_reason == "stop"
        return "tool_calls" if calls else update.finish_reason

    def _call(self, number: int, name: str, arguments: str) -> dict[str, Any]:
        if not name:
            return {"index": number, "function": {"arguments": arguments}}
        self._calls += 1
        function = {"name": name, "arguments": arguments}
        # Derived, so that a repeated answer has the same ids.
        digest = blake2b(f"{self._name}-{self._calls}".encode(), digest_size=16).hexdigest()
        return {
            "index": number,
            "id": f"call_{digest}",
            "type": "function",
            "function": function,
        }


def _choice(
    update: TextUpdate, content: dict[str, Any], reason: str | None, generation: AnyGeneration
) -> dict[str, Any]:
    logprobs = None
    if generation.spec.logprobs is not None:
        tokenizer = generation.tokenizer
        logprobs = chat_logprobs(tokenizer, update.token_ids, update.logprobs or Logprobs())
    choice = {"index": update.choice, **content, "logprobs": logprobs, "finish_reason": reason}
    if generation.spec.show_token_ids:
        choice["token_ids"] = update.token_ids
    return choice


def _whole(generation: AnyGeneration) -> dict[str, Any]:
    choices = []
    for each in generation.choices:
        ended, renderer = each.so_far(), ChoiceRenderer(generation, each.opened.choice)
        message = renderer.message(ended)
        reason = renderer.finish_reason(ended)
        choices.append(_choice(ended, {"message": message}, reason, generation))
    head = generation.head("chat.completion")
    return {**head, "choices": choices, "usage": generation.usage()}
