"""POST /tokenize and /detokenize in vLLM's shape, also under /v1 as in SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from prism.frontend.http import calls
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import PlainRoute
from prism.frontend.protocol.bodies import read_body
from prism.frontend.protocol.chat_types import TokenizeBody
from prism.frontend.protocol.openai_types import DetokenizeBody
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.frontend.requests.replies import while_connected
from prism.frontend.requests.specs import (
    SpecBuilder,
    check_ids,
    reject_if_longer_than_context,
)
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.model_spec import ModelSpec

router = APIRouter(route_class=PlainRoute)
# Tokens that are encoded as JSON in less time than handing them to a thread takes.
_INLINE_TOKENS_MAX = 4096


@router.post("/tokenize")
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: Request) -> Response:
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, TokenizeBody)
    with in_flight.request():
        model, tokenizer = _named(request, body.model)
        specs: SpecBuilder = request.app.state.specs
        ids = await while_connected(request, body, _ids(body, model, tokenizer, specs))
        return await _reply(lambda: _tokenized(body, model, tokenizer, ids), len(ids))


@router.post("/detokenize")
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: Request) -> Response:
    in_flight: InFlight = request.app.state.in_flight
    body = await read_body(request, DetokenizeBody)
    with in_flight.request():
        _, tokenizer = _named(request, body.model)
        return await _reply(lambda: _detokenized(body, tokenizer), len(body.tokens))


def _named(request: Request, name: str) -> tuple[ModelSpec, ModelTokenizer]:
    catalog: ModelCatalog = request.app.state.catalog
    model, _ = catalog.resolve(name)
    if (call := calls.current.get()) is not None:
        call.model = model.name
    return model, catalog.tokenizer(model.name)


async def _ids(
    body: TokenizeBody, model: ModelSpec, tokenizer: ModelTokenizer, specs: SpecBuilder
) -> list[int]:
    special = body.add_special_tokens
    if body.prompt is None:
        return (await specs.conversation(model, body, bool(special)))[1]
    reject_if_longer_than_context(model, body, tokenizer, len(body.prompt))
    [ids] = await tokenizer.encode([body.prompt], special is None or special)
    return ids


async def _reply(make: Callable[[], dict[str, Any]], tokens: int) -> Response:
    """Returns the result of `make` as JSON, from a thread if it has many tokens."""

    def content() -> bytes:
        return msgspec.json.encode(make())

    few = tokens <= _INLINE_TOKENS_MAX
    made = content() if few else await asyncio.to_thread(content)
    return Response(made, media_type="application/json")


def _tokenized(
    body: TokenizeBody, model: ModelSpec, tokenizer: ModelTokenizer, ids: list[int]
) -> dict[str, Any]:
    names = None
    if body.return_token_strs:
        names = [tokenizer.tokenizer.id_to_token(i) for i in ids]
    count = {"count": len(ids), "max_model_len": model.context_length}
    return {**count, "tokens": ids, "token_strs": names}


def _detokenized(body: DetokenizeBody, tokenizer: ModelTokenizer) -> dict[str, Any]:
    check_ids(body.tokens, body, tokenizer)
    # The batch method, since only that releases the interpreter's lock.
    [text] = tokenizer.tokenizer.decode_batch([body.tokens], skip_special_tokens=False)
    return {"prompt": text}
