"""POST /v1/embeddings: refused by name. The engines of the pool generate text."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.errors import BadRequestError
from prism.frontend.bodies import read_body
from prism.frontend.openai_types import EmbeddingsBody
from prism.frontend.services import services

router = APIRouter()


class NoEmbeddingsError(BadRequestError):
    """The model is served for text."""

    code = "model_has_no_embeddings"


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    found = services(request)
    body = await read_body(request, EmbeddingsBody)
    model = found.model(body.model)
    error = NoEmbeddingsError(
        f"model: {model.name} generates text, as all models here do, and has no embeddings; send"
        " this to a server of an embedding model"
    )
    error.param = "model"
    raise error
