"""From a checked body to a `GenerationSpec`: tokenise, fill in defaults, check the context."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from prism.errors import ContextLengthError
from prism.frontend.chat_template import ChatTemplate
from prism.frontend.errors import bad_request
from prism.frontend.generation import GenerationSpec
from prism.frontend.openai_types import ChatBody, CompletionBody, GenerationBody
from prism.frontend.services import Services
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.models import ModelSpec
from prism.messages.requests import Request, Sampling

# Engines hold it in 32 bits, where less becomes 0. Below this it means the likeliest token alone.
_TOP_P_MIN = 1e-6
_SLO_MIN_S = 1e-6


async def completion_spec(services: Services, body: CompletionBody) -> GenerationSpec:
    """Raises RequestError of the kind that fits."""
    clocks = (time.monotonic(), time.time())
    model = services.model(body.model)
    tokenizer = services.tokenizers[model.name]
    prompts = await _encoded(model, body, tokenizer)
    return _spec(services, body, clocks, prompts, tokenizer.eos_ids)


async def chat_spec(services: Services, body: ChatBody) -> GenerationSpec:
    """Raises RequestError of the kind that fits."""
    clocks = (time.monotonic(), time.time())
    model = services.model(body.model)
    tokenizer = services.tokenizers[model.name]
    if tokenizer.chat_template is None:
        raise bad_request(f"model: {model.name} has no chat template; use /v1/completions", "model")
    _refuse_hopeless(model, body, tokenizer, sum(len(m.content) for m in body.messages))
    # What takes long must not hold up the event loop, whose heartbeat keeps all requests alive.
    if body.is_short:
        text = _rendered(body, tokenizer.chat_template)
    else:
        text = await asyncio.to_thread(_rendered, body, tokenizer.chat_template)
    _refuse_hopeless(model, body, tokenizer, len(text))
    prompts = await tokenizer.encode([text], special_tokens=False)
    return _spec(services, body, clocks, prompts, tokenizer.chat_eos_ids)


def _rendered(body: ChatBody, template: ChatTemplate) -> str:
    return template.render(_messages(body), body.chat_template_kwargs)


def _messages(body: ChatBody) -> list[dict[str, Any]]:
    """As templates expect them; "developer" is OpenAI's newer word for "system"."""
    messages = [m.model_dump(exclude_none=True) for m in body.messages]
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
    return messages


async def _encoded(
    model: ModelSpec, body: CompletionBody, tokenizer: ModelTokenizer
) -> list[list[int]]:
    texts = [p for p in body.prompt if isinstance(p, str)]
    for text in texts:
        _refuse_hopeless(model, body, tokenizer, len(text))
    if texts:
        return await tokenizer.encode(texts, special_tokens=True)
    id_lists = [p for p in body.prompt if not isinstance(p, str)]
    for prompt in id_lists:
        if len(prompt) > model.context_length:
            raise _too_long(model, body, len(prompt))
        _check_ids(prompt, tokenizer)
    return id_lists


def _check_ids(prompt: list[int], tokenizer: ModelTokenizer) -> None:
    largest = max(prompt, default=0)
    if largest >= tokenizer.vocab_size:
        raise bad_request(
            f"prompt: token id {largest} is outside the vocabulary of"
            f" {tokenizer.vocab_size} tokens",
            "prompt",
        )


def _refuse_hopeless(
    model: ModelSpec, body: GenerationBody, tokenizer: ModelTokenizer, chars: int
) -> None:
    """Raises if the text exceeds the context however it is tokenised. Other requests would wait
    while megabytes are tokenised."""
    least = -(-chars // tokenizer.token_chars_max)
    if least > model.context_length:
        raise _too_long(model, body, least, "at least ")


def _too_long(
    model: ModelSpec, body: GenerationBody, prompt_tokens: int, how: str = ""
) -> ContextLengthError:
    asked = body.tokens_asked or 1
    excess = prompt_tokens + asked - model.context_length
    error = ContextLengthError(
        f"{model.name} has a context of {model.context_length} tokens; the prompt's"
        f" {how}{prompt_tokens} and max_tokens {asked} exceed it by {how}{excess}: shorten the"
        " prompt or lower max_tokens"
    )
    error.param = "messages" if isinstance(body, ChatBody) else "prompt"
    return error


def _spec(
    services: Services,
    body: GenerationBody,
    clocks: tuple[float, float],
    prompts: list[list[int]],
    eos_ids: tuple[int, ...],
) -> GenerationSpec:
    """`clocks`: the time of arrival, by the monotonic and by the wall clock."""
    model = services.model(body.model)
    room = min(_room(model, prompt, body) for prompt in prompts)
    ttft_s = model.slo_ttft_s if body.slo_ttft_ms is None else _slo_s(body.slo_ttft_ms)
    tpot_s = model.slo_tpot_s if body.slo_tpot_ms is None else _slo_s(body.slo_tpot_ms)
    spec_id = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid4().hex}"
    vocab_size = services.tokenizers[model.name].vocab_size
    sampling = _sampling(body, body.tokens_asked or room, eos_ids, vocab_size)
    requests = [
        Request(
            id=f"{spec_id}-{number}",
            model=model.name,
            prompt_ids=prompt,
            sampling=sampling,
            arrival_unix_s=clocks[1],
            slo_ttft_s=ttft_s,
            slo_tpot_s=tpot_s,
            frontend_id=services.dispatcher.frontend_id,
            reply_to=services.dispatcher.reply_to,
        )
        for number, prompt in enumerate(prompts)
    ]
    return GenerationSpec(
        id=spec_id,
        requests=requests,
        stops=tuple(body.stop or ()),
        show_token_ids=bool(body.return_token_ids),
        began_s=clocks[0],
    )


def _slo_s(asked_ms: float) -> float:
    """The least positive numbers would become 0."""
    return max(asked_ms / 1000, _SLO_MIN_S)


def _room(model: ModelSpec, prompt: list[int], body: GenerationBody) -> int:
    """Tokens that the context leaves for the output. Raises where that is not enough."""
    if not prompt:
        raise bad_request("prompt: is empty; give at least one token", "prompt")
    room = model.context_length - len(prompt)
    if room < (body.tokens_asked or 1):
        raise _too_long(model, body, len(prompt))
    return room


def _sampling(
    body: GenerationBody, max_tokens: int, eos_ids: tuple[int, ...], vocab_size: int
) -> Sampling:
    stop_ids = () if body.ignore_eos else eos_ids
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, _TOP_P_MIN),
        # The whole vocabulary and more is all tokens.
        top_k=-1 if body.top_k is None or body.top_k >= vocab_size else body.top_k,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        ignore_eos=body.ignore_eos,
        # An id outside the vocabulary never comes.
        stop_token_ids=tuple(
            dict.fromkeys((*stop_ids, *(i for i in body.stop_token_ids if i < vocab_size)))
        ),
    )
