"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.bodies import read_body
from prism.frontend.generation import TextUpdate
from prism.frontend.openai_types import CompletionBody
from prism.frontend.repeats import Answering, read_key
from prism.frontend.replies import Events, openai_events, reply_stream, reply_whole
from prism.frontend.services import services
from prism.frontend.specs import completion_spec

router = APIRouter()
KIND = "text_completion"


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, CompletionBody)
    key = await read_key(request, body)
    generation = found.generation(await completion_spec(found, body), key)
    if body.stream:
        choices = _choices(generation)
        events = openai_events(generation, KIND, choices, body.include_usage)
        return await reply_stream(request, found, generation, events)
    return await reply_whole(request, found, generation, lambda: _whole(generation))


async def _choices(generation: Answering) -> Events:
    async for update in generation.updates():
        yield _delta(update, generation.spec.show_token_ids)


def _delta(update: TextUpdate, show_ids: bool) -> dict[str, Any]:
    choice = {
        "index": update.choice,
        "text": update.text,
        "logprobs": None,
        "finish_reason": update.finish_reason,
    }
    return {**choice, "token_ids": update.token_ids} if show_ids else choice


def _whole(generation: Answering) -> dict[str, Any]:
    ended = [choice.so_far() for choice in generation.choices]
    choices = [_delta(update, generation.spec.show_token_ids) for update in ended]
    return {**generation.head(KIND), "choices": choices, "usage": generation.usage()}
