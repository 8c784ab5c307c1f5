"""Routes without FastAPI's handling of parameters and results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute, APIRouter
from starlette.types import ASGIApp, Receive, Scope, Send


class PlainRoute(APIRoute):
    """Route that FastAPI describes in `/openapi.json` but does not run: its handling of parameters
    and results takes longer than the route itself."""

    def __init__(
        self, path: str, endpoint: Callable[[Request], Awaitable[Response]], **more: Any
    ) -> None:
        super().__init__(path, endpoint, **more)
        self.app = _asgi(endpoint)


def _asgi(endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return answer


def add_plain(app: FastAPI, router: APIRouter) -> None:
    """Adds the routes of `router` directly, since `include_router` wraps them."""
    app.router.routes += router.routes
