"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.bodies import read_body
from prism.frontend.generation import Generation, Update
from prism.frontend.openai_types import ChatBody
from prism.frontend.orders import chat_order
from prism.frontend.replies import reply_stream, reply_whole
from prism.frontend.services import services
from prism.frontend.usage import usage_fields, with_usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, ChatBody)
    generation = found.generation(await chat_order(found, body))
    if body.stream:
        head = _head(generation, "chat.completion.chunk")
        events = with_usage(_events(generation, head), generation, head, body.include_usage)
        return await reply_stream(found, generation, events)
    return await reply_whole(request, found, generation, lambda: _whole(generation))


def _head(generation: Generation, kind: str) -> dict[str, Any]:
    order = generation.order
    return {
        "id": order.id,
        "object": kind,
        "created": int(order.arrival_unix_s),
        "model": order.model.name,
    }


async def _events(
    generation: Generation, head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    show_ids = generation.order.show_token_ids
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield {**head, "choices": [opening]}
    async for update in generation.updates(visible=True):
        yield {**head, "choices": [_delta(update, show_ids)]}


def _delta(update: Update, show_ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": update.choice,
        "delta": {"content": update.text},
        "logprobs": None,
        "finish_reason": update.finish_reason,
    }
    return {**choice, "token_ids": update.token_ids} if show_ids else choice


def _whole(generation: Generation) -> dict[str, Any]:
    choice = generation.choices[0]
    message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
    shown: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
    }
    if generation.order.show_token_ids:
        shown["token_ids"] = choice.token_ids
    head = _head(generation, "chat.completion")
    return {**head, "choices": [shown], "usage": usage_fields(generation.usage)}
