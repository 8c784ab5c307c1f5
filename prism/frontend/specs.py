"""From a checked body to a `GenerationSpec`: tokenise, fill in defaults, check the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar
from uuid import uuid4

from msgspec import structs

from prism.config.priority import PriorityConfig
from prism.errors import BadRequestError, ContextLengthError
from prism.frontend import calls
from prism.frontend.chat_template import ChatTemplate
from prism.frontend.chat_types import ChatBody, Conversation
from prism.frontend.errors import UnavailableError, bad_request
from prism.frontend.generation import GenerationSpec
from prism.frontend.grammars import grammar_of
from prism.frontend.openai_types import CompletionBody, GenerationBody, RequestBody
from prism.frontend.parsers import Parsing, behind_reasoning, tool_grammar
from prism.frontend.sampling import sampling_of
from prism.frontend.services import Services
from prism.frontend.tokenizers import ModelTokenizer
from prism.messages.models import ModelSpec
from prism.messages.requests import Grammar, Request, Sampling

T = TypeVar("T")
_SLO_MIN_S = 1e-6
# Marks the end of a text that is to go on: what templates write behind it may look like the text.
_GOES_ON = "ThisTextGoesOnHere"


class _Ends(NamedTuple):
    """What ends an output."""

    eos_ids: tuple[int, ...]
    grammar: Grammar | None


async def completion_spec(services: Services, body: CompletionBody) -> GenerationSpec:
    """Raises RequestError of the kind that fits."""
    model = _generating(services, body)
    tokenizer = services.tokenizer(model.name)
    prompts = await encoded(model, body, body.prompt, tokenizer)
    grammar = await _grammar(services, body, model)
    spec = _spec(services, body, prompts, _Ends(tokenizer.eos_ids, grammar))
    if not body.echo:
        return spec
    echoes = await asyncio.to_thread(_echoes, body, tokenizer)
    return replace(spec, echoes=echoes, hides_output=body.hides_output)


def _echoes(body: CompletionBody, tokenizer: ModelTokenizer) -> tuple[str, ...]:
    """Returns the prompt's text for each choice. A million tokens take a tenth of a second."""
    texts = (p if isinstance(p, str) else tokenizer.tokenizer.decode(p) for p in body.prompt)
    return tuple(text for text in texts for _ in range(body.choices_made))


async def chat_spec(services: Services, body: ChatBody) -> GenerationSpec:
    """Raises RequestError of the kind that fits."""
    model = _generating(services, body)
    tokenizer = services.tokenizer(model.name)
    text = await conversation_text(model, body, tokenizer)
    prompts = await tokenizer.encode([text], special_tokens=False)
    parsing = await services.parsers(model).parsing(body, model, tokenizer, text)
    grammar = await _grammar(services, body, model)
    if body.must_call:
        if grammar:
            message = "tool_choice: another field asks for a structure; give one of them, or auto"
            raise bad_request(message, "tool_choice")
        _refuse_min_tokens(body, "tool_choice")
    if parsing is not None and grammar is not None:
        grammar = behind_reasoning(parsing, grammar)
        await services.grammars(model).check(model, tokenizer, grammar, "response_format")
    elif parsing is not None:
        grammar = await _call_grammar(services, body, model, parsing)
    spec = _spec(services, body, prompts, _Ends(tokenizer.chat_eos_ids, grammar))
    # Tokens that begin a call or end the reasoning may be special.
    return replace(spec, parsing=parsing, skip_special_tokens=False) if parsing else spec


async def conversation_text(model: ModelSpec, body: Conversation, tokenizer: ModelTokenizer) -> str:
    """The prompt, as the model's template writes it. Raises RequestError of the kind that fits."""
    if tokenizer.template_error:
        unavailable = UnavailableError(
            f"conversations of {model.name} cannot be served now: {tokenizer.template_error};"
            " /v1/completions takes a prompt"
        )
        unavailable.code = "model_unavailable"
        raise unavailable
    if tokenizer.chat_template is None:
        message = f"model: {model.name} has no chat template; use /v1/completions, with a prompt"
        raise bad_request(message, "model")
    refuse_hopeless(model, body, tokenizer, sum(len(m.content) for m in body.messages))
    text = await _made(body, partial(_rendered, body, tokenizer.chat_template))
    refuse_hopeless(model, body, tokenizer, len(text))
    return text


async def _made(body: Conversation, make: Callable[[], T]) -> T:
    """Returns the result of `make`, which runs in a thread for a long conversation. It must not
    hold up the event loop, whose heartbeat keeps all requests alive."""
    return make() if body.is_short else await asyncio.to_thread(make)


async def _grammar(services: Services, body: GenerationBody, model: ModelSpec) -> Grammar | None:
    found = grammar_of(body)
    if found is None:
        return None
    _refuse_min_tokens(body, found[1])
    await services.grammars(model).check(model, services.tokenizer(model.name), *found)
    return found[0]


async def _call_grammar(
    services: Services, body: ChatBody, model: ModelSpec, parsing: Parsing
) -> Grammar | None:
    """What makes the model call. The arguments of a call that must be made follow its tool's
    schema where that compiles, even if the tool is not strict."""
    tokenizer = services.tokenizer(model.name)
    if body.must_call:
        with suppress(BadRequestError):
            if grammar := await _made(body, partial(tool_grammar, parsing, body, all_strict=True)):
                await services.grammars(model).check(model, tokenizer, grammar, "tools")
                return grammar
    grammar = await _made(body, partial(tool_grammar, parsing, body))
    if grammar is not None:
        await services.grammars(model).check(model, tokenizer, grammar, "tools")
    return grammar


def _refuse_min_tokens(body: GenerationBody, field: str) -> None:
    """Where a grammar has come to its end, no token would be left."""
    if body.min_tokens:
        raise bad_request(f"min_tokens: may not stand beside {field}; remove it", "min_tokens")


def _rendered(body: Conversation, template: ChatTemplate) -> str:
    """The prompt. An answer that the client begins goes on where its text ends."""
    messages = [message.for_template() for message in body.messages]
    if body.continue_final_message:
        content = messages[-1]["content"]
        if isinstance(content, list):
            content[-1]["text"] += _GOES_ON
        else:
            messages[-1]["content"] = content + _GOES_ON
    text = template.render(messages, body.template_values())
    if not body.continue_final_message:
        return text
    at = text.rfind(_GOES_ON)
    if at < 0:
        message = "continue_final_message: the model's template changes the last message"
        raise bad_request(message, "continue_final_message")
    return text[:at]


def _generating(services: Services, body: GenerationBody) -> ModelSpec:
    """Raises for a model that makes vectors."""
    model = services.model(body.model)
    if model.embedding is not None:
        error = bad_request(
            f"model: {model.name} makes embeddings and generates no text; use /v1/embeddings",
            "model",
        )
        error.code = "model_makes_embeddings"
        raise error
    return model


async def encoded(
    model: ModelSpec,
    body: RequestBody,
    prompts: Sequence[str | list[int]],
    tokenizer: ModelTokenizer,
) -> list[list[int]]:
    """The prompts' token ids; all of them are texts, or none is. Raises RequestError."""
    texts = [p for p in prompts if isinstance(p, str)]
    for text in texts:
        refuse_hopeless(model, body, tokenizer, len(text))
    if texts:
        return await tokenizer.encode(texts, special_tokens=True)
    id_lists = [p for p in prompts if not isinstance(p, str)]
    for prompt in id_lists:
        if len(prompt) > model.context_length:
            raise _too_long(model, body, len(prompt))
        check_ids(prompt, body, tokenizer)
    return id_lists


def check_ids(ids: list[int], body: RequestBody, tokenizer: ModelTokenizer) -> None:
    """Raises BadRequestError for one outside of the vocabulary."""
    largest = max(ids, default=0)
    if largest >= tokenizer.vocab_size:
        raise bad_request(
            f"{body.prompt_field}: token id {largest} is outside the vocabulary of"
            f" {tokenizer.vocab_size} tokens",
            body.prompt_field,
        )


def refuse_hopeless(
    model: ModelSpec, body: RequestBody, tokenizer: ModelTokenizer, chars: int
) -> None:
    """Raises if the text exceeds the context however it is tokenised. Other requests would wait
    while megabytes are tokenised."""
    least = -(-chars // tokenizer.token_chars_max)
    if least > model.context_length:
        raise _too_long(model, body, least, "at least ")


def _too_long(
    model: ModelSpec, body: RequestBody, prompt_tokens: int, how: str = ""
) -> ContextLengthError:
    asked = body.output_tokens_min
    excess = prompt_tokens + asked - model.context_length
    what, beside, remedy = "prompt", "", ""
    if not body.MAX_TOKENS:
        what, beside = body.prompt_field, f" and the {asked} kept free behind it"
    elif asked:
        beside, remedy = f" and {body.MAX_TOKENS} {asked}", f" or lower {body.MAX_TOKENS}"
    # In words that LiteLLM knows, and then tries a model with a longer context.
    error = ContextLengthError(
        f"{model.name}: this model's maximum context length is {model.context_length} tokens;"
        f" the {what}'s {how}{prompt_tokens}{beside} exceed it by {how}{excess}:"
        f" shorten the {what}{remedy}"
    )
    error.param = body.prompt_field
    return error


def _spec(
    services: Services,
    body: GenerationBody,
    prompts: list[list[int]],
    ends: _Ends,
) -> GenerationSpec:
    began_s, arrival_unix_s = calls.arrival()
    model, adapter = services.resolve(body.model)
    room = min(room_behind(model, prompt, body) for prompt in prompts)
    ttft_s = slo_s("slo_ttft_ms", body.slo_ttft_ms, model.slo_ttft_s, model.slo_least_ttft_s)
    tpot_s = slo_s("slo_tpot_ms", body.slo_tpot_ms, model.slo_tpot_s, model.slo_least_tpot_s)
    priority = checked_priority(body.priority or 0, services.config.frontend.priority)
    spec_id = f"{body.ID_PREFIX}{uuid4().hex}"
    tokenizer = services.tokenizer(model.name)
    sampling = sampling_of(body, tokenizer, body.tokens_asked or room, *ends)
    samplings = [_of_choice(sampling, number) for number in range(body.choices_made)]
    choices = [(prompt, each) for prompt in prompts for each in samplings]
    refuse_too_many(services, model, len(choices), "n" if len(samplings) > 1 else "prompt")
    requests = [
        Request(
            id=f"{spec_id}-{number}",
            model=model.name,
            prompt_ids=prompt,
            sampling=each,
            arrival_unix_s=arrival_unix_s,
            slo_ttft_s=ttft_s,
            slo_tpot_s=tpot_s,
            frontend_id=services.dispatcher.frontend_id,
            priority=priority,
            lora=adapter,
        )
        for number, (prompt, each) in enumerate(choices)
    ]
    return GenerationSpec(
        id=spec_id,
        requests=requests,
        asked_model=body.model,
        stops=tuple(body.stop or ()),
        show_token_ids=bool(body.return_token_ids),
        began_s=began_s,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=body.logprobs_asked,
        shown=(body.choices_asked, body.choices_made),
        show_slo=body.shows_slo,
    )


def _of_choice(sampling: Sampling, number: int) -> Sampling:
    """Choices of one prompt differ although the client gives one seed. The first one computes what
    is shown of the prompt."""
    if not number:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + number + 2**63) % 2**64 - 2**63
    return structs.replace(sampling, seed=seed, prompt_logprobs=False)


def refuse_too_many(services: Services, model: ModelSpec, asked: int, param: str) -> None:
    """More than can ever be open is no matter of trying again."""
    most = services.dispatcher.log.most_of_one_model
    if asked > most:
        bound = "fit at once (frontend.max_open_requests)"
        message = f"{param}: makes {asked} choices; at most {most} of {model.name} {bound}"
        raise bad_request(message, param)


def slo_s(field: str, asked_ms: float | None, usual_s: float, least_s: float) -> float:
    """Raises BadRequestError for a target that is tighter than the model's bound. The least
    positive numbers would become 0."""
    if asked_ms is None:
        return usual_s
    if asked_ms < least_s * 1000:
        raise bad_request(
            f"{field}: {asked_ms:g} is below the {least_s * 1000:g} that may be asked for", field
        )
    return max(asked_ms / 1000, _SLO_MIN_S)


def checked_priority(asked: int, bounds: PriorityConfig) -> int:
    """Raises BadRequestError."""
    if not bounds.min <= asked <= bounds.max:
        raise bad_request(
            f"priority: {asked} is not between {bounds.min} and {bounds.max}, the bounds of this"
            " server (frontend.priority)",
            "priority",
        )
    return asked


def room_behind(model: ModelSpec, prompt: list[int], body: RequestBody) -> int:
    """Tokens that the context leaves for the output. Raises where that is not enough."""
    if not prompt:
        field = body.prompt_field
        raise bad_request(f"{field}: is empty; give at least one token", field)
    room = model.context_length - len(prompt)
    if room < body.output_tokens_min:
        raise _too_long(model, body, len(prompt))
    return room
