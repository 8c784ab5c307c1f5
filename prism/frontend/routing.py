"""Routes that read their requests themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute, APIRouter
from starlette.types import ASGIApp, Receive, Scope, Send


class PlainRoute(APIRoute):
    """FastAPI describes it in `/openapi.json` and has no part in its requests: with no parameters
    to find and no result to check, what it does takes longer than the route itself."""

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
    """The routes of `router` as they are: those of an included one are wrapped by FastAPI's own."""
    app.router.routes += router.routes
