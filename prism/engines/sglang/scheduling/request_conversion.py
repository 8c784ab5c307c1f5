"""Conversion of Prism's requests to SGLang's, with the checks of SGLang's tokenizer manager."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from prism.engines.request_checks import check, check_ranges, seed_of
from prism.errors import BadRequestError
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Request, Sampling

Converter = Callable[..., TokenizedGenerateReqInput | TokenizedEmbeddingReqInput]


def convert(
    request: Request, rid: str, *, context_length: int, vocab_size: int
) -> TokenizedGenerateReqInput:
    """Returns SGLang's input for `request` under the engine-local id `rid`.

    Raises RequestError if it can never run. The frontend checks the same; this is the last line of
    defence against silent truncation by SGLang.
    """
    check(request, context_length, vocab_size)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", request.prompt_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling_params(request.sampling, vocab_size),
        return_logprob=request.sampling.logprobs is not None,
        logprob_start_len=0 if request.wants_prompt_logprobs else -1,
        top_logprobs_num=request.sampling.logprobs or 0,
        token_ids_logprob=None,
        stream=True,
        lora_id=request.lora or None,
    )


def convert_embedding(
    request: Request, rid: str, *, context_length: int, vocab_size: int
) -> TokenizedEmbeddingReqInput:
    """Returns SGLang's input for a request to an embedding model. Raises RequestError if it can
    never run."""
    check(request, context_length, vocab_size)
    params = SamplingParams(max_new_tokens=0)
    params.normalize(None)
    return TokenizedEmbeddingReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", request.prompt_ids),
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
    )


def converter(model: ModelSpec) -> Converter:
    """Returns the function that converts the model's requests."""
    return convert_embedding if model.embedding else convert


def sampling_params(sampling: Sampling, vocab_size: int) -> SamplingParams:
    """Returns SGLang's parameters. Raises BadRequestError for values out of range.

    SGLang checks some values only when it creates tensors, where an error ends the engine.
    """
    check_ranges(sampling)
    try:
        params = SamplingParams(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if 0 < sampling.top_k < vocab_size else TOP_K_ALL,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=set(sampling.stop_token_ids) or None,
            sampling_seed=seed_of(sampling),
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias={str(i): bias for i, bias in sampling.logit_bias.items()} or None,
            **_grammar(sampling),
        )
        params.normalize(None)
        # SGLang rejects it without a tokenizer, from which it takes only stop tokens; the request
        # has its stop tokens.
        params.min_new_tokens = sampling.min_tokens
        params.verify(vocab_size)
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    return params


def _grammar(sampling: Sampling) -> dict[str, str]:
    grammar = sampling.grammar
    if grammar is None:
        return {}
    return {"json_schema" if grammar.kind == "json" else grammar.kind: grammar.text}
