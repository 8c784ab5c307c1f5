"""Sampling of the fake model, whose output depends on the prompt alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import structs

from prism.engines.fake.tokens import expected_embedding
from prism.messages.model_spec import EmbeddingSpec
from prism.messages.requests import Chunk, Failure, Logprobs, Request

LN2 = math.log(2)


def reject_unsupported(request: Request) -> Failure | None:
    """Returns a failure if the request has options that would have to change the output."""
    sampling = request.sampling
    lacking = "grammars" if sampling.grammar else "logit_bias" if sampling.logit_bias else ""
    if not lacking:
        return None
    text = f"the fake engine does not support {lacking}"
    return Failure(request.id, request.attempt, "invalid_request_error", text)


def with_requested_data(chunk: Chunk, request: Request, embedding: EmbeddingSpec | None) -> Chunk:
    """Returns the chunk with the requested log probabilities. For an embedding model it has the
    vector instead of tokens."""
    if embedding is not None:
        vector = expected_embedding(request.prompt_ids, embedding.size).tobytes()
        return structs.replace(chunk, token_ids=[], finish_reason="stop", embedding=vector)
    top = request.sampling.logprobs
    if top is None:
        return chunk
    of_prompt = request.wants_prompt_logprobs and not chunk.first_index
    prompt = logprobs_of(request.prompt_ids[1:], top) if of_prompt else None
    own = logprobs_of(chunk.token_ids, top)
    return structs.replace(chunk, logprobs=own, prompt_logprobs=prompt)


def logprobs_of(token_ids: Sequence[int], top: int) -> Logprobs:
    """Returns log probabilities in which each token is the most likely one. The following ids are
    next, each with half the probability of the one before."""
    nearest = [[token + step for step in range(top)] for token in token_ids]
    falling = [[-(step + 1) * LN2 for step in range(top)] for _ in token_ids]
    return Logprobs([-LN2] * len(token_ids), nearest if top else [], falling if top else [])
