"""POST /reload, where the pages of operators have a socket of their own: what `prism-serve reload`
does with the YAML that the cluster follows."""

from __future__ import annotations

import asyncio
import sys

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from prism.frontend.errors import bad_request
from prism.frontend.services import services
from prism.process import child_environment

router = APIRouter()


@router.post("/reload")
async def reload(request: Request) -> JSONResponse:
    """Answers when all processes follow, with what has changed; 400 where nothing has, and why."""
    run_dir = services(request).config.run_dir
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prism.serve.reload", run_dir,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )  # fmt: skip
    said, _ = await process.communicate()
    text = said.decode(errors="replace").strip()
    if process.returncode:
        error = bad_request(text)
        error.code = "reload"
        raise error
    return JSONResponse({"status": "reloaded", "changes": text.removeprefix("reloaded: ")})
