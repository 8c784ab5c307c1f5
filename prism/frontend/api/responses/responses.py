"""POST /v1/responses: a chat completion as items."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.errors import BadRequestError, RequestError
from prism.frontend.api.openai.chat_parts import ChatParts, Kind
from prism.frontend.api.responses.response_types import ResponsesBody
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.requests.idempotency import AnyGeneration, SharedAnswers, read_key
from prism.frontend.requests.replies import (
    Event,
    Events,
    reply_stream,
    reply_whole,
    run_in_thread_if_slow,
    while_connected,
)
from prism.frontend.requests.specs import SpecBuilder

router = APIRouter(route_class=PlainRoute)

# Kind of a part -> (type of its item, prefix of the item's id, further fields).
_ITEMS: dict[Kind, tuple[str, str, Event]] = {
    "call": ("function_call", "fc", {}),
    "reasoning": ("reasoning", "rs", {"summary": [], "content": []}),
    "text": ("message", "msg", {"role": "assistant", "content": []}),
}
# Kind of a part -> content of its item, without the text.
_CONTENTS: dict[Kind, Event] = {
    "reasoning": {"type": "reasoning_text", "text": ""},
    "text": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    specs: SpecBuilder = request.app.state.specs
    answers: SharedAnswers = request.app.state.answers
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, ResponsesBody)
    key = await read_key(request, body)
    with in_flight.request():
        try:
            spec = await while_connected(request, body, specs.chat(body.chat))
        except BadRequestError as error:
            raise body.renamed(error) from error
        generation = answers.generation(spec, key)
        answer = _Answer(body, generation)
        if body.stream:
            return await reply_stream(request, generation, answer.events(), named=True)
        return await reply_whole(request, generation, answer.whole)


class _Answer:
    """Answer of one request, whole or as events."""

    def __init__(self, body: ResponsesBody, generation: AnyGeneration) -> None:
        self._body, self._generation = body, generation

    def whole(self) -> dict[str, Any]:
        items = _Items(self._generation)
        items.take_whole()
        return self._ended(items)

    async def events(self) -> Events:
        """Yields events in OpenAI's order."""
        number, items = count(), _Items(self._generation)
        for kind in ("created", "in_progress"):
            yield _event(f"response.{kind}", number, response=self._response("in_progress", []))
        try:
            async for events in items.updates():
                for event in events:
                    yield event | {"sequence_number": next(number)}
        except RequestError as error:
            yield _event("response.failed", number, response=self._failed(items, error))
            raise
        tokens = len(self._generation.choices[0].token_ids)
        ended = await run_in_thread_if_slow(
            lambda: self._ended(items), self._generation.spec, tokens
        )
        yield _event(f"response.{ended['status']}", number, response=ended)

    def _ended(self, items: _Items) -> dict[str, Any]:
        usage = self._usage(items)
        if items.finish_reason != "length":
            return self._response("completed", items.parts, usage=usage)
        why = {"reason": "max_output_tokens"}
        return self._response("incomplete", items.parts, usage=usage, incomplete_details=why)

    def _failed(self, items: _Items, error: RequestError) -> dict[str, Any]:
        for _ in items.close(cut=True):
            pass
        # Both codes are in OpenAI's fixed set.
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        fields = {"code": code, "message": f"{error.code}: {error}"}
        return self._response("failed", items.parts, error=fields)

    def _response(self, status: str, output: list[Event], **more: Any) -> dict[str, Any]:
        head = self._generation.head("response")
        sampling = self._generation.spec.requests[0].sampling
        return {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": head["model"],
            "output": output,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            **self._body.echo,
            **more,
        }

    def _usage(self, items: _Items) -> dict[str, Any]:
        made = self._generation.usage()
        reasoned = self._generation.tokenizer.count(items.reasoning)
        return {
            "input_tokens": made["prompt_tokens"],
            "input_tokens_details": made["prompt_tokens_details"],
            "output_tokens": made["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": made["total_tokens"],
            **({"slo": made["slo"]} if "slo" in made else {}),
        }


class _Items(ChatParts):
    """Output of a response, and its events without their numbers."""

    @property
    def reasoning(self) -> str:
        """Text of all reasoning items."""
        contents = [item["content"] for item in self.parts if item["type"] == "reasoning"]
        return "".join(part["text"] for content in contents for part in content)

    def _begin(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        item_type, prefix, fields = _ITEMS[kind]
        name, number = self._generation.spec.id.removeprefix("resp_"), len(self.parts)
        if call:
            fields = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        item_id = f"{prefix}_{name}_{number}"
        item = {"id": item_id, "type": item_type, "status": "in_progress", **fields}
        self.parts.append(item)
        # A copy, since the item is filled later.
        yield {"type": "response.output_item.added", "output_index": number, "item": {**item}}
        if kind != "call":
            part = _content(kind, "")
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _delta(self, kind: Kind, text: str) -> Event:
        if kind == "call":
            return self._of_item("response.function_call_arguments.delta", delta=text)
        return self._of_text(kind, "delta", delta=text)

    def _end(self, kind: Kind, text: str, cut: bool) -> Iterator[Event]:
        item = self.parts[-1]
        item["status"] = "incomplete" if cut else "completed"
        if kind == "call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            item["content"] = [part := _content(kind, text)]
            yield self._of_text(kind, "done", text=text)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        number = len(self.parts) - 1
        yield {"type": "response.output_item.done", "output_index": number, "item": item}

    def _of_text(self, kind: Kind, what: str, **fields: Any) -> Event:
        if kind == "text":
            fields["logprobs"] = []
        event = f"response.{_CONTENTS[kind]['type']}.{what}"
        return self._of_item(event, content_index=0, **fields)

    def _of_item(self, event: str, **fields: Any) -> Event:
        place = {"item_id": self.parts[-1]["id"], "output_index": len(self.parts) - 1}
        return {"type": event, **place, **fields}


def _content(kind: Kind, text: str) -> Event:
    """Returns the only part of an item with text."""
    return {**_CONTENTS[kind], "text": text}


def _event(kind: str, number: Iterator[int], **fields: Any) -> Event:
    return {"type": kind, "sequence_number": next(number), **fields}
