"""Checks of a request before it is submitted to an engine."""

from __future__ import annotations

import secrets

from prism.errors import BadRequestError, ContextLengthError, RequestError
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Failure, Request, Sampling

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38
_FLOAT32_MIN = 1.2e-38  # smaller values round to 0


def failure(request: Request, error: RequestError) -> Failure:
    return Failure(request.id, request.attempt, error.code, str(error))


def seed_of(sampling: Sampling) -> int:
    """Returns the request's seed, or a random one: an engine with seeds enabled would otherwise
    use one seed for all requests that have none."""
    return sampling.seed if sampling.seed is not None else secrets.randbits(62)


def check_ranges(sampling: Sampling) -> None:
    """Raises BadRequestError for values that 32-bit tensors of counts, ids and probabilities cannot
    hold."""
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
            raise BadRequestError(f"{name}: {value} must be between {least} and {most}")


def check_images(request: Request, model: ModelSpec) -> None:
    """Raises BadRequestError for images that the model does not take."""
    if request.images and model.images is None:
        raise BadRequestError(f"{model.name} does not take images; remove them")


def check(request: Request, context_length: int, vocab_size: int) -> None:
    """Raises RequestError for a request that can never run. The frontend checks the same; this
    check is the last line of defence."""
    prompt = request.prompt_ids
    if not prompt:
        raise BadRequestError("the prompt is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise BadRequestError(f"a prompt token id is outside the vocabulary of {vocab_size}")
    excess = len(prompt) + request.sampling.max_tokens - context_length
    if excess > 0:
        raise ContextLengthError(
            f"prompt ({len(prompt)}) plus max_tokens ({request.sampling.max_tokens}) exceed the "
            f"model's context of {context_length} tokens by {excess}"
        )
