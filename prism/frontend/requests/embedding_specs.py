"""Embeddings: converts a checked body to a `GenerationSpec`, and vectors to an answer.

The queue and engines handle them as requests with one output that is not a token. SLOs on the time
to the answer, shedding, rates and retries apply as to all requests.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from prism.errors import BadRequestError
from prism.frontend.http import calls
from prism.frontend.http.errors import bad_request
from prism.frontend.protocol.openai_types import EmbeddingsBody
from prism.frontend.requests.generation import GenerationSpec
from prism.frontend.requests.services import Services
from prism.frontend.requests.specs import (
    checked_priority,
    encoded,
    output_tokens_left,
    reject_too_many_choices,
    slo_s,
)
from prism.messages.models import ModelSpec
from prism.messages.requests import Request, Sampling

_ONE_OUTPUT = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class NoEmbeddingsError(BadRequestError):
    """The model generates text and does not have embeddings."""

    code = "model_has_no_embeddings"


async def embedding_spec(services: Services, body: EmbeddingsBody) -> GenerationSpec:
    """Returns the spec of a request for embeddings. Raises RequestError."""
    began_s, arrival_unix_s = calls.arrival()
    model, _ = services.resolve(body.model)
    _check_able(model, body.dimensions)
    prompts = await encoded(model, body, body.input, services.tokenizer(model.name))
    for prompt in prompts:
        output_tokens_left(model, prompt, body)
    reject_too_many_choices(services, model, len(prompts), "input")
    ttft_s = slo_s("slo_ttft_ms", body.slo_ttft_ms, model.slo_ttft_s, model.slo_least_ttft_s)
    priority = checked_priority(body.priority or 0, services.config.frontend.priority)
    spec_id = f"embd-{uuid4().hex}"
    requests = [
        Request(
            id=f"{spec_id}-{number}",
            model=model.name,
            prompt_ids=prompt,
            sampling=_ONE_OUTPUT,
            arrival_unix_s=arrival_unix_s,
            slo_ttft_s=ttft_s,
            slo_tpot_s=model.slo_tpot_s,
            frontend_id=services.dispatcher.frontend_id,
            priority=priority,
        )
        for number, prompt in enumerate(prompts)
    ]
    shows = body.slo_ttft_ms is not None if body.return_slo is None else body.return_slo
    return GenerationSpec(
        spec_id, requests, (), False, began_s, body.model, show_slo=shows, embeds=True
    )


def _check_able(model: ModelSpec, dimensions: int | None) -> None:
    if model.embedding is None:
        error = NoEmbeddingsError(
            f"model: {model.name} does not have embeddings; use an embedding model"
        )
        error.param = "model"
        raise error
    if dimensions is not None and not model.embedding.may_have(dimensions):
        known = sorted({*model.embedding.dimensions, model.embedding.size})
        raise bad_request(
            f"dimensions: {dimensions} is not supported by {model.name}; give one of"
            f" {', '.join(map(str, known))}, or omit the field",
            "dimensions",
        )


def vector(embedding: bytes, dimensions: int | None, form: Literal["float", "base64"]) -> Any:
    """Returns the vector truncated to `dimensions`, normalized again, in the client's format."""
    values = np.frombuffer(embedding, "<f4")
    if dimensions is not None and dimensions < len(values):
        values = values[:dimensions]
        values = (values / (np.linalg.norm(values) or 1.0)).astype("<f4")
    return b64encode(values.tobytes()).decode() if form == "base64" else values.tolist()
