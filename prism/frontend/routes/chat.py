"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.bodies import read_body
from prism.frontend.generation import TextUpdate
from prism.frontend.openai_types import ChatBody
from prism.frontend.repeats import Answering, read_key
from prism.frontend.replies import Events, openai_events, reply_stream, reply_whole
from prism.frontend.services import services
from prism.frontend.specs import chat_spec

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, ChatBody)
    key = await read_key(request, body)
    generation = found.generation(await chat_spec(found, body), key)
    if body.stream:
        kind, choices = "chat.completion.chunk", _choices(generation)
        events = openai_events(generation, kind, choices, body.include_usage)
        return await reply_stream(request, found, generation, events)
    return await reply_whole(request, found, generation, lambda: _whole(generation))


async def _choices(generation: Answering) -> Events:
    yield {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    async for update in generation.updates():
        yield _choice(update, {"delta": {"content": update.text}}, generation)


def _choice(update: TextUpdate, said: dict[str, Any], generation: Answering) -> dict[str, Any]:
    end = {"logprobs": None, "finish_reason": update.finish_reason}
    ids = {"token_ids": update.token_ids} if generation.spec.show_token_ids else {}
    return {"index": update.choice, **said, **end, **ids}


def _whole(generation: Answering) -> dict[str, Any]:
    ended = generation.choices[0].so_far()
    message = {"role": "assistant", "content": ended.text, "refusal": None}
    choice = _choice(ended, {"message": message}, generation)
    head = generation.head("chat.completion")
    return {**head, "choices": [choice], "usage": generation.usage()}
