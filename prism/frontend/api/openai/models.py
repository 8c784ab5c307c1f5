"""GET /v1/models: the configured models, their aliases and adapters, whether placed or not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prism.frontend.requests.services import Services, services
from prism.messages.models import ModelSpec

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    found = services(request)
    return {"object": "list", "data": [_card(found, *named) for named in found.names()]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    found = services(request)
    return _card(found, name, *found.resolve(name))


def _card(found: Services, name: str, model: ModelSpec, adapter: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": found.started_unix_s,
        "owned_by": "prism",
        "max_model_len": model.context_length,
        "root": model.named(adapter),  # the name that `id` may be an alias of
        "parent": model.name if adapter else None,
    }
