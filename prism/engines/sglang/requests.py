"""Prism's requests and SGLang's: checked and converted as its tokenizer manager would do."""

from __future__ import annotations

import secrets
from array import array

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from prism.errors import BadRequestError, ContextLengthError, RequestError
from prism.messages.requests import Failure, Request, Sampling

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38
_FLOAT32_MIN = 1.2e-38  # less would become 0


def convert(
    request: Request, rid: str, *, context_length: int, vocab_size: int
) -> TokenizedGenerateReqInput:
    """SGLang's input for `request` under the engine-local id `rid`.

    Raises RequestError when it can never run: the frontend checks the same, so this is the last
    line of defence that keeps SGLang from truncating silently.
    """
    _check(request, context_length, vocab_size)
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


def sampling_params(sampling: Sampling, vocab_size: int) -> SamplingParams:
    """Raises BadRequestError for values out of range.

    SGLang checks some of them only where it makes tensors, and an error there ends the engine.
    """
    _check_ranges(sampling)
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
            sampling_seed=_seed(sampling),
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias={str(i): bias for i, bias in sampling.logit_bias.items()} or None,
            **_grammar(sampling),
        )
        params.normalize(None)
        # Without a tokenizer SGLang refuses it; it asks the tokenizer for stop tokens alone, which
        # the request has.
        params.min_new_tokens = sampling.min_tokens
        params.verify(vocab_size)
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    return params


def failure(request: Request, error: RequestError) -> Failure:
    return Failure(request.id, request.attempt, error.code, str(error))


def _seed(sampling: Sampling) -> int:
    """With seeds on, SGLang gives every request without one the same; each must get its own."""
    return sampling.seed if sampling.seed is not None else secrets.randbits(62)


def _grammar(sampling: Sampling) -> dict[str, str]:
    grammar = sampling.grammar
    if grammar is None:
        return {}
    return {"json_schema" if grammar.kind == "json" else grammar.kind: grammar.text}


def _check_ranges(sampling: Sampling) -> None:
    """What the tensors hold: 32 bits for counts, ids and probabilities."""
    last_stop_id = max(sampling.stop_token_ids, default=0)
    ranges = {
        "max_tokens": (sampling.max_tokens, 1, _INT32_MAX),
        "top_k": (sampling.top_k, -1, _INT32_MAX),
        "stop_token_ids": (last_stop_id, 0, _INT32_MAX),
        "temperature": (sampling.temperature, 0, _FLOAT32_MAX),
        "top_p": (sampling.top_p, _FLOAT32_MIN, 1),
        "repetition_penalty": (sampling.repetition_penalty, _FLOAT32_MIN, 2),
        "logprobs": (sampling.logprobs or 0, 0, _INT32_MAX),
        "logit_bias": (max(map(abs, sampling.logit_bias.values()), default=0), 0, _FLOAT32_MAX),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise BadRequestError(f"{name}: {value} must lie between {least} and {most}")


def _check(request: Request, context_length: int, vocab_size: int) -> None:
    prompt = request.prompt_ids
    if not prompt:
        raise BadRequestError("the prompt is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise BadRequestError(f"a prompt token id lies outside the vocabulary of {vocab_size}")
    excess = len(prompt) + request.sampling.max_tokens - context_length
    if excess > 0:
        raise ContextLengthError(
            f"prompt ({len(prompt)}) plus max_tokens ({request.sampling.max_tokens}) exceed the "
            f"model's context of {context_length} tokens by {excess}"
        )
