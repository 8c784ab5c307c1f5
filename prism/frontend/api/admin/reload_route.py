"""POST /reload: runs `prism-serve reload` with the cluster's YAML. Served only on the separate
socket of the operators' pages."""

from __future__ import annotations

import asyncio
import sys

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from prism.frontend.http.error_bodies import bad_request
from prism.frontend.live_config import LiveConfig
from prism.process import child_environment

router = APIRouter()


@router.post("/reload")
async def reload(request: Request) -> JSONResponse:
    """Answers with the changes once all processes have applied them, or with 400 and the reason if
    nothing was changed."""
    live: LiveConfig = request.app.state.live
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prism.serve.reload_command", live.config.run_dir,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )  # fmt: skip
    output, _ = await process.communicate()
    text = output.decode(errors="replace").strip()
    if process.returncode:
        raise bad_request(text, code="reload")
    return JSONResponse({"status": "reloaded", "changes": text.removeprefix("reloaded: ")})
