"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.bodies import read_body
from prism.frontend.chat_types import ChatBody
from prism.frontend.generation import TextUpdate
from prism.frontend.logprobs import chat_logprobs
from prism.frontend.repeats import Answering, read_key
from prism.frontend.replies import Events, openai_events, reply_stream, reply_whole
from prism.frontend.services import services
from prism.frontend.specs import chat_spec
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.requests import Logprobs

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, ChatBody)
    key = await read_key(request, body)
    generation = found.generation(await chat_spec(found, body), key)
    tokenizer = found.tokenizers[body.model]
    if body.stream:
        kind, choices = "chat.completion.chunk", _choices(generation, tokenizer)
        events = openai_events(generation, kind, choices, body.include_usage)
        return await reply_stream(request, found, generation, events)
    return await reply_whole(request, found, generation, lambda: _whole(generation, tokenizer))


async def _choices(generation: Answering, tokenizer: ModelTokenizer) -> Events:
    for choice in generation.choices:
        begin = {"role": "assistant", "content": ""}
        yield {"index": choice.opened.choice, "delta": begin, "finish_reason": None}
    async for update in generation.updates():
        yield _choice(update, {"delta": {"content": update.text}}, generation, tokenizer)


def _choice(
    update: TextUpdate, said: dict[str, Any], generation: Answering, tokenizer: ModelTokenizer
) -> dict[str, Any]:
    logprobs = None
    if generation.spec.logprobs is not None:
        logprobs = chat_logprobs(tokenizer, update.token_ids, update.logprobs or Logprobs())
    end = {"logprobs": logprobs, "finish_reason": update.finish_reason}
    ids = {"token_ids": update.token_ids} if generation.spec.show_token_ids else {}
    return {"index": update.choice, **said, **end, **ids}


def _whole(generation: Answering, tokenizer: ModelTokenizer) -> dict[str, Any]:
    choices = []
    for each in generation.choices:
        ended = each.so_far()
        message = {"role": "assistant", "content": ended.text, "refusal": None}
        choices.append(_choice(ended, {"message": message}, generation, tokenizer))
    head = generation.head("chat.completion")
    return {**head, "choices": choices, "usage": generation.usage()}
