"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.protocol.openai_types import EmbeddingsBody
from prism.frontend.requests.embedding_answers import vector
from prism.frontend.requests.idempotency import AnyGeneration, SharedAnswers, read_key
from prism.frontend.requests.replies import reply_whole
from prism.frontend.requests.specs import SpecBuilder

router = APIRouter(route_class=PlainRoute)


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    specs: SpecBuilder = request.app.state.specs
    answers: SharedAnswers = request.app.state.answers
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, EmbeddingsBody)
    key = await read_key(request, body)
    with in_flight.request():
        generation = answers.generation(await specs.embeddings(body), key)
        return await reply_whole(request, generation, lambda: _answer(generation, body))


def _answer(generation: AnyGeneration, body: EmbeddingsBody) -> dict[str, Any]:
    form, dimensions = body.encoding_format, body.dimensions
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": vector(choice.embedding, dimensions, form),
        }
        for index, choice in enumerate(generation.choices)
    ]
    usage = generation.usage()
    del usage["completion_tokens"]
    return {"object": "list", "data": data, "model": body.model, "usage": usage}
