"""Converts a checked body to a `GenerationSpec`: tokenizes, applies defaults, checks lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar
from uuid import uuid4

from msgspec import structs

from prism import clock
from prism.config.schema.priority import PriorityConfig
from prism.errors import BadRequestError, ContextLengthError
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.http import calls
from prism.frontend.http.error_bodies import UnavailableError, bad_request
from prism.frontend.live_config import LiveConfig
from prism.frontend.protocol.chat_types import ChatBody, Conversation
from prism.frontend.protocol.openai_types import (
    CompletionBody,
    EmbeddingsBody,
    GenerationBody,
    RequestBody,
)
from prism.frontend.requests.adapter_modules import AdapterModules
from prism.frontend.requests.answer_parsing import Parsing, after_reasoning, tool_grammar
from prism.frontend.requests.embedding_answers import check_able
from prism.frontend.requests.generation import GenerationSpec
from prism.frontend.requests.grammars import grammar_of
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.frontend.requests.prompt_images import PromptImages
from prism.frontend.requests.sampling import sampling_of
from prism.frontend.text.chat_template import ChatTemplate
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.image_tensors import PromptImage
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Grammar, Request, Sampling

T = TypeVar("T")
_SLO_MIN_S = 1e-6
# Marks the end of a text to be continued, since templates may append similar text.
_CONTINUATION_MARK = "ThisTextGoesOnHere"
_ONE_OUTPUT = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class _Ends(NamedTuple):
    """Conditions that end an output."""

    eos_ids: tuple[int, ...]
    grammar: Grammar | None


class SpecBuilder:
    """Converter of checked bodies to a `GenerationSpec`. For one event loop."""

    def __init__(self, live: LiveConfig, catalog: ModelCatalog, dispatcher: Dispatcher) -> None:
        self.modules = AdapterModules(live)
        self.images = PromptImages(live, dispatcher.log)
        self._live = live
        self._catalog = catalog
        self._dispatcher = dispatcher

    async def completion(self, body: CompletionBody) -> GenerationSpec:
        """Returns the spec of a completion. Raises RequestError."""
        model, adapter = self._generating(body)
        tokenizer = self._catalog.tokenizer(model.name)
        prompts = await _encoded(model, body, body.prompt, tokenizer)
        grammar = await self._grammar(body, model)
        ends = _Ends(tokenizer.eos_ids, grammar)
        spec = self._spec(body, model, adapter, prompts, ends)
        if not body.echo:
            return spec
        echoes = await asyncio.to_thread(_echoes, body, tokenizer)
        return replace(spec, echoes=echoes, hides_output=body.hides_output)

    async def chat(self, body: ChatBody) -> GenerationSpec:
        """Returns the spec of a chat completion. Raises RequestError."""
        model, adapter = self._generating(body)
        tokenizer = self._catalog.tokenizer(model.name)
        text, ids, images = await self.conversation(model, body)
        parsing = await self.modules.parsers(model).parsing(body, model, tokenizer, text)
        grammar = await self._grammar(body, model)
        if body.must_call:
            if grammar:
                message = "tool_choice: cannot be combined with a structured output; use auto"
                raise bad_request(message, "tool_choice")
            _reject_min_tokens(body, "tool_choice")
        if parsing is not None and grammar is not None:
            grammar = after_reasoning(parsing, grammar)
            await self._check(model, grammar, "response_format")
        elif parsing is not None:
            grammar = await self._call_grammar(body, model, parsing)
        ends = _Ends(tokenizer.chat_eos_ids, grammar)
        spec = self._spec(body, model, adapter, [ids], ends)
        if images:
            shown = [structs.replace(each, images=images) for each in spec.requests]
            spec = replace(spec, requests=shown)
        # Special tokens are kept: they may begin a call or end the reasoning.
        return replace(spec, parsing=parsing, skip_special_tokens=False) if parsing else spec

    async def conversation(
        self, model: ModelSpec, body: Conversation, special_tokens: bool = False
    ) -> tuple[str, list[int], tuple[PromptImage, ...]]:
        """Returns the prompt as text and as token ids, which have those of its images, and these.
        Raises RequestError."""
        images = model.images if body.image_urls else None
        if body.image_urls and images is None:
            field = body.prompt_field
            raise bad_request(f"{field}: {model.name} does not take images; remove them", field)
        tokenizer = self._catalog.tokenizer(model.name)
        text = await conversation_text(model, body, tokenizer)
        [ids] = await tokenizer.encode([text], special_tokens)
        if images is None:
            return text, ids, ()
        return text, *await self.images.prompt(model, images, body, ids)

    async def embeddings(self, body: EmbeddingsBody) -> GenerationSpec:
        """Returns the spec of a request for embeddings. Raises RequestError.

        The queue and engines handle each input as a request with one output that is not a token.
        SLOs on the time to the answer, shedding, rates and retries apply as to all requests.
        """
        model, _ = self._catalog.resolve(body.model)
        check_able(model, body.dimensions)
        prompts = await _encoded(model, body, body.input, self._catalog.tokenizer(model.name))
        for prompt in prompts:
            _output_tokens_left(model, prompt, body)
        self._reject_too_many(model, len(prompts), "input")
        shared = self._shared(body, model, "", tpot_ms=None)
        spec_id = f"embd-{uuid4().hex}"
        shows = body.slo_ttft_ms is not None if body.return_slo is None else body.return_slo
        return GenerationSpec(
            id=spec_id,
            requests=_numbered(spec_id, shared, ((prompt, _ONE_OUTPUT) for prompt in prompts)),
            asked_model=body.model,
            began_s=calls.arrived_s(),
            show_slo=shows,
            embeds=True,
        )

    def _generating(self, body: GenerationBody) -> tuple[ModelSpec, str]:
        """Returns the model of the request and its adapter. Raises BadRequestError for an embedding
        model."""
        model, adapter = self._catalog.resolve(body.model)
        if model.embedding is not None:
            message = f"model: {model.name} is an embedding model; use /v1/embeddings"
            raise bad_request(message, "model", "model_makes_embeddings")
        return model, adapter

    async def _grammar(self, body: GenerationBody, model: ModelSpec) -> Grammar | None:
        found = grammar_of(body)
        if found is None:
            return None
        _reject_min_tokens(body, found[1])
        await self._check(model, *found)
        return found[0]

    async def _call_grammar(
        self, body: ChatBody, model: ModelSpec, parsing: Parsing
    ) -> Grammar | None:
        """Returns the grammar of the tool calls, or None. If a call is required, it enforces the
        schema of all tools, or only of the strict ones if the schemas do not compile."""
        if body.must_call:
            with suppress(BadRequestError):
                strict = partial(tool_grammar, parsing, body, all_strict=True)
                if grammar := await _run_in_thread_if_long(body, strict):
                    await self._check(model, grammar, "tools")
                    return grammar
        grammar = await _run_in_thread_if_long(body, partial(tool_grammar, parsing, body))
        if grammar is not None:
            await self._check(model, grammar, "tools")
        return grammar

    async def _check(self, model: ModelSpec, grammar: Grammar, field: str) -> None:
        """Raises RequestError if the grammar cannot be compiled or tried."""
        tokenizer = self._catalog.tokenizer(model.name)
        await self.modules.grammars(model).check(model, tokenizer, grammar, field)

    def _spec(
        self,
        body: GenerationBody,
        model: ModelSpec,
        adapter: str,
        prompts: list[list[int]],
        ends: _Ends,
    ) -> GenerationSpec:
        left = min(_output_tokens_left(model, prompt, body) for prompt in prompts)
        shared = self._shared(body, model, adapter, body.slo_tpot_ms)
        tokenizer = self._catalog.tokenizer(model.name)
        sampling = sampling_of(body, tokenizer, body.tokens_asked or left, *ends)
        samplings = [_of_choice(sampling, number) for number in range(body.choices_made)]
        choices = [(prompt, each) for prompt in prompts for each in samplings]
        self._reject_too_many(model, len(choices), "n" if len(samplings) > 1 else "prompt")
        spec_id = f"{body.ID_PREFIX}{uuid4().hex}"
        return GenerationSpec(
            id=spec_id,
            requests=_numbered(spec_id, shared, choices),
            asked_model=body.model,
            stops=tuple(body.stop or ()),
            show_token_ids=bool(body.return_token_ids),
            began_s=calls.arrived_s(),
            skip_special_tokens=body.skip_special_tokens,
            logprobs=body.logprobs_asked,
            shown=(body.choices_asked, body.choices_made),
            show_slo=body.shows_slo,
        )

    def _shared(
        self,
        body: GenerationBody | EmbeddingsBody,
        model: ModelSpec,
        adapter: str,
        tpot_ms: float | None,
    ) -> Request:
        """Returns what the requests of all choices have in common. Raises BadRequestError for an
        SLO or a priority that is out of bounds."""
        return Request(
            id="",
            model=model.name,
            prompt_ids=[],
            sampling=_ONE_OUTPUT,
            arrival_unix_s=calls.arrived_s() + clock.ahead_s(),
            slo_ttft_s=_slo_s(
                "slo_ttft_ms", body.slo_ttft_ms, model.slo_ttft_s, model.slo_least_ttft_s
            ),
            slo_tpot_s=_slo_s("slo_tpot_ms", tpot_ms, model.slo_tpot_s, model.slo_least_tpot_s),
            frontend_id=self._dispatcher.frontend_id,
            priority=_checked_priority(body.priority or 0, self._live.config.frontend.priority),
            lora=adapter,
        )

    def _reject_too_many(self, model: ModelSpec, asked: int, param: str) -> None:
        """Raises BadRequestError for more choices than the limit. A retry can never succeed, so
        this is 400, not 429."""
        most = self._dispatcher.log.max_per_model
        if asked > most:
            limit = f"at most {most} of {model.name} can be open (frontend.max_open_requests)"
            raise bad_request(f"{param}: requests {asked} choices; {limit}", param)


def _numbered(
    spec_id: str, shared: Request, choices: Iterable[tuple[list[int], Sampling]]
) -> list[Request]:
    """Returns the request of each choice."""
    return [
        structs.replace(shared, id=f"{spec_id}-{number}", prompt_ids=prompt, sampling=sampling)
        for number, (prompt, sampling) in enumerate(choices)
    ]


def _echoes(body: CompletionBody, tokenizer: ModelTokenizer) -> tuple[str, ...]:
    """Returns the prompt's text for each choice. A million tokens take a tenth of a second."""
    texts = (p if isinstance(p, str) else tokenizer.tokenizer.decode(p) for p in body.prompt)
    return tuple(text for text in texts for _ in range(body.choices_made))


async def conversation_text(model: ModelSpec, body: Conversation, tokenizer: ModelTokenizer) -> str:
    """Returns the prompt rendered by the model's template. Raises RequestError."""
    if tokenizer.template_error:
        message = (
            f"conversations of {model.name} cannot be served now: {tokenizer.template_error};"
            " /v1/completions takes a prompt"
        )
        raise UnavailableError(message, "model_unavailable")
    if tokenizer.chat_template is None:
        message = f"model: {model.name} does not have a chat template; use /v1/completions"
        raise bad_request(message, "model")
    reject_if_longer_than_context(
        model, body, tokenizer, sum(len(m.content) for m in body.messages)
    )
    text = await _run_in_thread_if_long(body, partial(_rendered, body, tokenizer.chat_template))
    reject_if_longer_than_context(model, body, tokenizer, len(text))
    return text


async def _run_in_thread_if_long(body: Conversation, make: Callable[[], T]) -> T:
    """Returns the result of `make`, which runs in a thread for a long conversation, since the event
    loop's heartbeat keeps all requests alive."""
    return make() if body.is_short else await asyncio.to_thread(make)


def _reject_min_tokens(body: GenerationBody, field: str) -> None:
    """Raises BadRequestError for min_tokens: after the end of a grammar no token is allowed."""
    if body.min_tokens:
        message = f"min_tokens: cannot be combined with {field}; remove one of them"
        raise bad_request(message, "min_tokens")


def _rendered(body: Conversation, template: ChatTemplate) -> str:
    """Returns the prompt, which ends with the client's text if the final message is continued."""
    messages = [message.for_template() for message in body.messages]
    if body.continue_final_message:
        content = messages[-1]["content"]
        if isinstance(content, list):
            content[-1]["text"] += _CONTINUATION_MARK
        else:
            messages[-1]["content"] = content + _CONTINUATION_MARK
    text = template.render(messages, body.template_values())
    if not body.continue_final_message:
        return text
    at = text.rfind(_CONTINUATION_MARK)
    if at < 0:
        message = "continue_final_message: the model's template changes the last message"
        raise bad_request(message, "continue_final_message")
    return text[:at]


async def _encoded(
    model: ModelSpec,
    body: RequestBody,
    prompts: Sequence[str | list[int]],
    tokenizer: ModelTokenizer,
) -> list[list[int]]:
    """Returns the prompts' token ids. REQUIRES: all prompts are texts, or none is. Raises
    RequestError."""
    texts = [p for p in prompts if isinstance(p, str)]
    for text in texts:
        reject_if_longer_than_context(model, body, tokenizer, len(text))
    if texts:
        return await tokenizer.encode(texts, special_tokens=True)
    id_lists = [p for p in prompts if not isinstance(p, str)]
    for prompt in id_lists:
        if len(prompt) > model.context_length:
            raise _too_long(model, body, len(prompt))
        check_ids(prompt, body, tokenizer)
    return id_lists


def check_ids(ids: list[int], body: RequestBody, tokenizer: ModelTokenizer) -> None:
    """Raises BadRequestError for an id outside of the vocabulary."""
    largest = max(ids, default=0)
    if largest >= tokenizer.vocab_size:
        raise bad_request(
            f"{body.prompt_field}: token id {largest} is outside the vocabulary of"
            f" {tokenizer.vocab_size} tokens",
            body.prompt_field,
        )


def reject_if_longer_than_context(
    model: ModelSpec, body: RequestBody, tokenizer: ModelTokenizer, chars: int
) -> None:
    """Raises ContextLengthError if the text exceeds the context however it is tokenized. Tokenizing
    megabytes would delay other requests."""
    least = -(-chars // tokenizer.token_chars_max)
    if least > model.context_length:
        raise _too_long(model, body, least, "at least ")


def _too_long(
    model: ModelSpec, body: RequestBody, prompt_tokens: int, how: str = ""
) -> ContextLengthError:
    asked = body.output_tokens_min
    excess = prompt_tokens + asked - model.context_length
    what, output, remedy = "prompt", "", ""
    if not body.MAX_TOKENS:
        what, output = body.prompt_field, f" and the {asked} reserved after it"
    elif asked:
        output, remedy = f" and {body.MAX_TOKENS} {asked}", f" or lower {body.MAX_TOKENS}"
    # LiteLLM recognizes this wording and then tries a model with a longer context.
    error = ContextLengthError(
        f"{model.name}: this model's maximum context length is {model.context_length} tokens;"
        f" the {what}'s {how}{prompt_tokens}{output} exceed it by {how}{excess}:"
        f" shorten the {what}{remedy}"
    )
    error.param = body.prompt_field
    return error


def _of_choice(sampling: Sampling, number: int) -> Sampling:
    """Returns the sampling of one choice of a prompt. Each choice has its own seed, and only the
    first computes the log probabilities of the prompt."""
    if not number:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + number + 2**63) % 2**64 - 2**63
    return structs.replace(sampling, seed=seed, prompt_logprobs=False)


def _slo_s(field: str, asked_ms: float | None, usual_s: float, least_s: float) -> float:
    """Returns the SLO in seconds, at least _SLO_MIN_S, since tiny numbers would become 0. Raises
    BadRequestError for a target tighter than the model's limit."""
    if asked_ms is None:
        return usual_s
    if asked_ms < least_s * 1000:
        raise bad_request(
            f"{field}: {asked_ms:g} is below the model's minimum of {least_s * 1000:g}", field
        )
    return max(asked_ms / 1000, _SLO_MIN_S)


def _checked_priority(asked: int, bounds: PriorityConfig) -> int:
    """Returns the priority. Raises BadRequestError if it is out of bounds."""
    if not bounds.min <= asked <= bounds.max:
        raise bad_request(
            f"priority: {asked} is not between {bounds.min} and {bounds.max}, the limits of this"
            " server (frontend.priority)",
            "priority",
        )
    return asked


def _output_tokens_left(model: ModelSpec, prompt: list[int], body: RequestBody) -> int:
    """Returns the number of tokens that the context leaves for the output. Raises BadRequestError
    for an empty prompt, or ContextLengthError if that is too few."""
    if not prompt:
        field = body.prompt_field
        raise bad_request(f"{field}: is empty; give at least one token", field)
    left = model.context_length - len(prompt)
    if left < body.output_tokens_min:
        raise _too_long(model, body, len(prompt))
    return left
