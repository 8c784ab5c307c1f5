"""From a checked body to an `Order`: tokenise, fill in defaults, check against the context."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prism.errors import ContextLengthError
from prism.frontend.errors import bad_request
from prism.frontend.generation import Order
from prism.frontend.openai_types import ChatBody, CompletionBody, GenerationBody
from prism.frontend.services import Services
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages import ModelSpec, Sampling


async def completion_order(services: Services, body: CompletionBody) -> Order:
    """Raises RequestError of the kind that fits."""
    arrival = _Arrival.now("cmpl")
    model = services.model(body.model)
    tokenizer = services.tokenizers[model.name]
    prompts = await _encoded(model, body, tokenizer)
    return _order(arrival, model, body, prompts, tokenizer.eos_ids)


async def chat_order(services: Services, body: ChatBody) -> Order:
    """Raises RequestError of the kind that fits."""
    arrival = _Arrival.now("chatcmpl")
    model = services.model(body.model)
    tokenizer = services.tokenizers[model.name]
    if tokenizer.chat_template is None:
        raise bad_request(f"model: {model.name} has no chat template; use /v1/completions", "model")
    _refuse_hopeless(model, body, tokenizer, sum(len(m.content) for m in body.messages))
    text = tokenizer.chat_template.render(_messages(body), body.chat_template_kwargs)
    _refuse_hopeless(model, body, tokenizer, len(text))
    prompts = await tokenizer.encode([text], special_tokens=False)
    return _order(arrival, model, body, prompts, tokenizer.chat_eos_ids)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What kind of request came, and when, on both clocks."""

    prefix: str
    s: float
    unix_s: float

    @classmethod
    def now(cls, prefix: str) -> _Arrival:
        return cls(prefix, time.monotonic(), time.time())


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
    """Raises for a text that exceeds the context however it is tokenised: tokenising megabytes
    takes the time of others."""
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


def _order(
    arrival: _Arrival,
    model: ModelSpec,
    body: GenerationBody,
    prompts: list[list[int]],
    eos_ids: tuple[int, ...],
) -> Order:
    room = min(_room(model, prompt, body) for prompt in prompts)
    ttft_s = model.slo_ttft_s if body.slo_ttft_ms is None else body.slo_ttft_ms / 1000
    tpot_s = model.slo_tpot_s if body.slo_tpot_ms is None else body.slo_tpot_ms / 1000
    return Order(
        id=f"{arrival.prefix}-{uuid4().hex}",
        model=model,
        prompts=prompts,
        sampling=_sampling(body, body.tokens_asked or room, eos_ids),
        stops=tuple(body.stop or ()),
        slo_ttft_s=ttft_s,
        slo_tpot_s=tpot_s,
        show_token_ids=bool(body.return_token_ids),
        began_s=arrival.s,
        arrival_unix_s=arrival.unix_s,
    )


def _room(model: ModelSpec, prompt: list[int], body: GenerationBody) -> int:
    """Tokens that the context leaves for the output. Raises where that is not enough."""
    if not prompt:
        raise bad_request("prompt: is empty; give at least one token", "prompt")
    room = model.context_length - len(prompt)
    if room < (body.tokens_asked or 1):
        raise _too_long(model, body, len(prompt))
    return room


def _sampling(body: GenerationBody, max_tokens: int, eos_ids: tuple[int, ...]) -> Sampling:
    stop_ids = () if body.ignore_eos else eos_ids
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=-1 if body.top_k is None else body.top_k,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys((*stop_ids, *body.stop_token_ids))),
    )
