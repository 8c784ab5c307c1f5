"""POST /v1/responses: a chat completion as items."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.errors import BadRequestError, RequestError
from prism.frontend.api.openai.chat import ChoiceRenderer, split_calls
from prism.frontend.api.responses.response_types import ResponsesBody, renamed
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.requests.idempotency import AnyGeneration, read_key
from prism.frontend.requests.replies import Events, reply_stream, reply_whole, run_in_thread_if_slow
from prism.frontend.requests.services import services
from prism.frontend.requests.specs import chat_spec
from prism.frontend.text.tokenizers import ModelTokenizer

router = APIRouter(route_class=PlainRoute)
Event = dict[str, Any]

# Type of an item with text -> (prefix of its id, further fields, type of its part, further fields
# of its part).
_WITH_TEXT: dict[str, tuple[str, Event, str, Event]] = {
    "message": ("msg", {"role": "assistant"}, "output_text", {"annotations": [], "logprobs": []}),
    "reasoning": ("rs", {"summary": []}, "reasoning_text", {}),
}


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, ResponsesBody)
    key = await read_key(request, body)
    try:
        spec = await chat_spec(found, body.chat)
    except BadRequestError as error:
        raise renamed(error) from error
    generation = found.generation(spec, key)
    answer = _Answer(body, generation, found.tokenizer(body.model))
    if body.stream:
        return await reply_stream(request, found, generation, answer.events(), named=True)
    return await reply_whole(request, found, generation, answer.whole)


class _Answer:
    """Answer of one request, whole or as events."""

    def __init__(
        self, body: ResponsesBody, generation: AnyGeneration, tokenizer: ModelTokenizer
    ) -> None:
        self._body, self._generation, self._tokenizer = body, generation, tokenizer

    def whole(self) -> dict[str, Any]:
        items = _Items(self._generation.spec.id)
        [choice] = self._generation.choices
        for delta in ChoiceRenderer(self._generation, 0).in_order(choice.so_far()):
            for _ in items.take(delta):
                pass
        for _ in items.end(self._cut):
            pass
        return self._ended(items)

    async def events(self) -> Events:
        """Yields events in OpenAI's order."""
        number = count()
        items, renderer = _Items(self._generation.spec.id), ChoiceRenderer(self._generation, 0)
        for kind in ("created", "in_progress"):
            yield _event(f"response.{kind}", number, response=self._response("in_progress", []))
        try:
            async for update in self._generation.updates():
                delta = await run_in_thread_if_slow(
                    partial(renderer.delta, update), self._generation.spec, len(update.token_ids)
                )
                for event in items.take(delta):
                    yield event | {"sequence_number": next(number)}
        except RequestError as error:
            yield _event("response.failed", number, response=self._failed(items, error))
            raise
        for event in items.end(self._cut):
            yield event | {"sequence_number": next(number)}
        tokens = len(self._generation.choices[0].token_ids)
        ended = await run_in_thread_if_slow(
            lambda: self._ended(items), self._generation.spec, tokens
        )
        yield _event(f"response.{ended['status']}", number, response=ended)

    @property
    def _cut(self) -> bool:
        return self._generation.choices[0].finish_reason == "length"

    def _ended(self, items: _Items) -> dict[str, Any]:
        if not self._cut:
            return self._response("completed", items.output, usage=self._usage(items))
        why = {"reason": "max_output_tokens"}
        usage = self._usage(items)
        return self._response("incomplete", items.output, usage=usage, incomplete_details=why)

    def _failed(self, items: _Items, error: RequestError) -> dict[str, Any]:
        for _ in items.close("incomplete"):
            pass
        # Both codes are in OpenAI's fixed set.
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        fields = {"code": code, "message": f"{error.code}: {error}"}
        return self._response("failed", items.output, error=fields)

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
        reasoned = self._tokenizer.count(items.reasoning)
        return {
            "input_tokens": made["prompt_tokens"],
            "input_tokens_details": made["prompt_tokens_details"],
            "output_tokens": made["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": made["total_tokens"],
            **({"slo": made["slo"]} if "slo" in made else {}),
        }


class _Items:
    """Output of a response, built item by item, and its events without their numbers. It takes
    deltas of a chat completion, or its whole message as one."""

    def __init__(self, response_id: str) -> None:
        self.output: list[Event] = []
        self._name = response_id.removeprefix("resp_")
        self._open = ""  # type of the last item while it is open
        self._pieces: list[str] = []  # of its text, or of a call's arguments
        self._space: list[str] = []  # held back: it belongs to a message if one follows

    @property
    def reasoning(self) -> str:
        """Text of all reasoning items."""
        contents = [item["content"] for item in self.output if item["type"] == "reasoning"]
        return "".join(part["text"] for content in contents for part in content)

    def take(self, delta: dict[str, Any]) -> Iterator[Event]:
        if reasoning := delta.get("reasoning_content"):
            yield from self._write("reasoning", reasoning)
        continued, new = split_calls(delta)
        for call in continued:
            yield from self._call(call)
        if text := delta.get("content"):
            yield from self._message(text)
        for call in new:
            yield from self._call(call)

    def end(self, cut: bool) -> Iterator[Event]:
        """Closes the last item. Adds an empty message if none was written."""
        if not self.output:
            yield from self._write("message", "".join(self._space))
        yield from self.close("incomplete" if cut else "completed")

    def close(self, status: str) -> Iterator[Event]:
        """Closes the last item."""
        if not self._open:
            return
        kind, text, item = self._open, "".join(self._pieces), self.output[-1]
        self._open = ""
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            item["content"] = [part := self._part(kind, text)]
            yield self._of_text(kind, "done", text=text)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.output) - 1,
            "item": item,
        }

    def _message(self, text: str) -> Iterator[Event]:
        """Writes text. Space before and between calls does not start a message."""
        if self._open != "message" and not text.strip():
            self._space.append(text)
            return
        before, self._space = self._space, []
        yield from self._write("message", "".join([*before, text]))

    def _write(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            prefix, extra, _, _ = _WITH_TEXT[kind]
            yield from self._begin(kind, prefix, {**extra, "content": []})
            part = self._part(kind, "")
            yield self._of_item("response.content_part.added", content_index=0, part=part)
        self._pieces.append(text)
        if text:
            yield self._of_text(kind, "delta", delta=text)

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            self._space = []
            fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begin("function_call", "fc", fields)
        self._pieces.append(function["arguments"])
        if function["arguments"]:
            delta = function["arguments"]
            yield self._of_item("response.function_call_arguments.delta", delta=delta)

    def _begin(self, kind: str, prefix: str, fields: Event) -> Iterator[Event]:
        yield from self.close("completed")
        number = len(self.output)
        item_id = f"{prefix}_{self._name}_{number}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.output.append(item)
        self._open, self._pieces = kind, []
        # A copy, since the item is filled later.
        yield {"type": "response.output_item.added", "output_index": number, "item": {**item}}

    @staticmethod
    def _part(kind: str, text: str) -> Event:
        _, _, part, extra = _WITH_TEXT[kind]
        return {"type": part, "text": text, **extra}

    def _of_text(self, kind: str, what: str, **fields: Any) -> Event:
        if kind == "message":
            fields["logprobs"] = []
        return self._of_item(f"response.{_WITH_TEXT[kind][2]}.{what}", content_index=0, **fields)

    def _of_item(self, event: str, **fields: Any) -> Event:
        number = len(self.output) - 1
        place = {"item_id": self.output[-1]["id"], "output_index": number}
        return {"type": event, **place, **fields}


def _event(kind: str, number: Iterator[int], **fields: Any) -> Event:
    return {"type": kind, "sequence_number": next(number), **fields}
