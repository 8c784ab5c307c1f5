"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.bodies import read_body
from prism.frontend.generation import Choice, Generation, Update
from prism.frontend.openai_types import CompletionBody
from prism.frontend.orders import completion_order
from prism.frontend.replies import reply_stream, reply_whole
from prism.frontend.services import services
from prism.frontend.usage import usage_fields, with_usage

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, CompletionBody)
    generation = found.generation(await completion_order(found, body))
    head = _head(generation)
    if body.stream:
        events = with_usage(_events(generation, head), generation, head, body.include_usage)
        return await reply_stream(found, generation, events)
    return await reply_whole(request, found, generation, lambda: _whole(generation, head))


def _head(generation: Generation) -> dict[str, Any]:
    order = generation.order
    return {
        "id": order.id,
        "object": "text_completion",
        "created": int(order.arrival_unix_s),
        "model": order.model.name,
    }


async def _events(
    generation: Generation, head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    show_ids = generation.order.show_token_ids
    async for update in generation.updates(visible=True):
        yield {**head, "choices": [_delta(update, show_ids)]}


def _delta(update: Update, show_ids: bool) -> dict[str, Any]:
    choice = {
        "index": update.choice,
        "text": update.text,
        "logprobs": None,
        "finish_reason": update.finish_reason,
    }
    return {**choice, "token_ids": update.token_ids} if show_ids else choice


def _whole(generation: Generation, head: dict[str, Any]) -> dict[str, Any]:
    show_ids = generation.order.show_token_ids
    choices = [_choice(choice, show_ids) for choice in generation.choices]
    return {**head, "choices": choices, "usage": usage_fields(generation.usage)}


def _choice(choice: Choice, show_ids: bool) -> dict[str, Any]:
    number = choice.opened.choice
    ended = Update(number, "".join(choice.texts), choice.token_ids, choice.finish_reason)
    return _delta(ended, show_ids)
