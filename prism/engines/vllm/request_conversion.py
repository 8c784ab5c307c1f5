"""Conversion of Prism's requests to vLLM's, with the checks of vLLM's input processor."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request as VllmRequest

from prism.engines.request_checks import check, check_ranges, seed_of
from prism.errors import BadRequestError
from prism.messages.requests import Logprobs, Request


def convert(request: Request, rid: str, core: EngineCore, context_length: int) -> VllmRequest:
    """Returns vLLM's request under the engine-local id `rid`. Output of a resumed request is a part
    of its prompt. Raises RequestError if it can never run."""
    model_config = core.vllm_config.model_config
    check(request, context_length, model_config.get_vocab_size())
    params = sampling_params(request)
    try:
        params.verify(model_config, None, None, None)
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    done = request.resume.output_ids if request.resume else []
    return VllmRequest(
        rid, [*request.prompt_ids, *done], params, None, block_hasher=core.request_block_hasher
    )


def sampling_params(request: Request) -> SamplingParams:
    """Returns vLLM's parameters. Raises BadRequestError for values that vLLM rejects."""
    sampling, done = request.sampling, request.resumed_tokens
    check_ranges(sampling)
    if sampling.grammar is not None:
        raise BadRequestError("the vllm engine does not support grammars; remove the structure")
    top_logprobs = sampling.logprobs
    try:
        return SamplingParams(
            max_tokens=sampling.max_tokens - done,
            min_tokens=max(0, sampling.min_tokens - done),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            min_p=sampling.min_p,
            # A resumed request must not repeat the draws of its first tokens.
            seed=seed_of(sampling) + done if sampling.temperature > 0 else None,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias or None,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=top_logprobs,
            prompt_logprobs=(top_logprobs or 0) if request.wants_prompt_logprobs else None,
            detokenize=False,
        )
    except ValueError as error:
        raise BadRequestError(str(error)) from error


def logprobs_of(found: Any) -> Logprobs | None:
    """Converts vLLM's rows, which have the token's own value first, then the most likely ones."""
    if found is None:
        return None
    ids, values = found.logprob_token_ids.tolist(), found.logprobs.tolist()
    return Logprobs(
        [row[0] for row in values], [row[1:] for row in ids], [row[1:] for row in values]
    )
