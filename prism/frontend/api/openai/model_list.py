"""GET /v1/models: the configured models, their aliases and adapters, whether placed or not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prism.frontend.requests.model_catalog import ModelCatalog
from prism.messages.model_spec import ModelSpec

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    catalog: ModelCatalog = request.app.state.catalog
    return {"object": "list", "data": [_card(catalog, *named) for named in catalog.names()]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    catalog: ModelCatalog = request.app.state.catalog
    return _card(catalog, name, *catalog.resolve(name))


def _card(catalog: ModelCatalog, name: str, model: ModelSpec, adapter: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": catalog.started_unix_s,
        "owned_by": "prism",
        "max_model_len": model.context_length,
        "root": model.named(adapter),  # the name that `id` may be an alias of
        "parent": model.name if adapter else None,
    }
