"""GET /v1/models: the configured models, their aliases and adapters, whether placed or not.

Of external models it tells the name alone.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from prism.frontend.external.servers import ExternalServers
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.messages.external import ExternalModel
from prism.messages.model_spec import ModelSpec

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    catalog: ModelCatalog = request.app.state.catalog
    external: ExternalServers = request.app.state.external
    cards = [_card(catalog, *named) for named in catalog.names()]
    cards += [_external_card(catalog, name, model) for name, model in external.models()]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    catalog: ModelCatalog = request.app.state.catalog
    external: ExternalServers = request.app.state.external
    if (model := external.find(name)) is not None:
        return _external_card(catalog, name, model)
    return _card(catalog, name, *catalog.resolve(name))


def _external_card(catalog: ModelCatalog, name: str, model: ExternalModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": catalog.started_unix_s,
        "owned_by": "external",
        "root": model.name,
    }


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
