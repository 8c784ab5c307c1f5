"""GET /dashboard: page that shows the cluster live, from /status and /metrics."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Allows only this server's files and figures: nothing from other hosts, nothing inline.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


# Name -> content; about 30 KB.
_FILES = {
    file.name: file.read_bytes()
    for file in Path(__file__).parents[2].joinpath("dashboard").iterdir()
}


@router.get("/")
@router.get("/dashboard")
async def to_the_page() -> Response:
    """Redirects to the page. The URL is relative, so that it works with a proxy's path prefix."""
    return RedirectResponse("dashboard/", headers=HEADERS)


@router.get("/dashboard/{name:path}")
async def file_of_the_page(name: str) -> Response:
    name = name or "index.html"
    if name not in _FILES:
        raise HTTPException(404, "no such file")
    return Response(_FILES[name], 200, HEADERS, _MEDIA_TYPES[Path(name).suffix])
