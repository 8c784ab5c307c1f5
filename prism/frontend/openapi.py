"""Schema of `/openapi.json`, with errors and with the bodies, which FastAPI does not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from prism.frontend.api.anthropic.message_types import CountBody, MessagesBody
from prism.frontend.api.responses.response_types import ResponsesBody
from prism.frontend.protocol.chat_types import ChatBody, TokenizeBody
from prism.frontend.protocol.openai_types import (
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    RequestBody,
)

_SCHEMAS = "#/components/schemas/"
_BODIES: Mapping[str, type[RequestBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}
_ANY_ERRORS = {401: "the API key is missing or unknown", 500: "internal error"}
_MODEL_ERRORS = {404: "the model does not exist", 503: "the model cannot be served now"}
_BODY_ERRORS = {
    400: "the body is not valid; the message names the field",
    408: "the body was not received in time",
    413: "the body is too large",
    429: "too many requests",
}
_GENERATION_ERRORS = {
    422: "the Idempotency-Key was used with another body",
    504: "no token was generated in time",
}
_EVENTS: dict[str, Any] = {"text/event-stream": {}}


def describe(app: FastAPI, has_keys: bool = False) -> None:
    """Sets the schema of `app`. `has_keys`: True if requests require an API key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, has_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI, has_keys: bool) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's validation, which is not used
            errors = dict(_ANY_ERRORS)
            if path.startswith("/v1/models/"):
                errors |= _MODEL_ERRORS
            if (body := _BODIES.get(path)) is not None:
                errors |= _MODEL_ERRORS | _BODY_ERRORS
                operation["requestBody"] = _request_body(body, schemas)
                if "stream" in body.model_fields or body is EmbeddingsBody:
                    errors |= _GENERATION_ERRORS
                if "stream" in body.model_fields:
                    operation["responses"]["200"]["content"] |= _EVENTS
            shape = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            operation["responses"] |= {str(s): _error(what, shape) for s, what in errors.items()}
    made["components"] = {"schemas": schemas}
    if has_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
        made["paths"]["/health"]["get"]["security"] = []
    return made


def _request_body(body: type[RequestBody], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = body.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    schemas |= schema.pop("$defs", {})
    schemas[body.__name__] = schema
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + body.__name__}}}
    return {"required": True, "content": content}


def _error(what: str, shape: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{shape}"}}}
    return {"description": what, "content": content}
