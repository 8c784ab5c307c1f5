"""A real HTTP server that speaks OpenAI's streaming format with delays and faults on command.

The model's name selects the answer: "good" answers, "slow" pauses between tokens, "stuck" never
ends, "refused" is a 503 in OpenAI's shape, "broken" ends without a finish reason, "short" gives one
token too few, "dying" ends with an error event, "garbage" is not JSON, "textual" reports no token
ids and a first token without text, "lines" gives Unicode's line separators as they are.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from prism.messages.agent import AgentReport, ModelReport
from prism.messages.cluster import ClusterStatus

MODELS = ("good", "slow", "stuck", "refused", "broken", "short", "dying", "garbage")
MODELS += ("textual", "lines")
SLOW_STEP_S = 0.05


@dataclass
class ScriptedServer:
    """`requests`: the bodies received, in order of arrival. `with_status`: offer /status. `key`:
    the API key of all requests. `uds`: path of a Unix socket to serve on, instead of a port.
    `status_text`: body of /status, instead of Prism's."""

    with_status: bool = True
    context: int | None = 4096
    owner: str = "prism"
    key: str = ""
    uds: str | None = None
    status_text: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    in_flight_most: int = 0
    in_flight: int = 0
    url: str = ""
    process: uvicorn.Server | None = None

    def stop(self) -> None:
        """Ends as a server that is shut down; `running` waits for it."""
        if self.process:
            self.process.should_exit = True

    def app(self) -> FastAPI:
        app = FastAPI(dependencies=[Depends(self.check_key)])
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.completions)
        app.get("/status")(self.status)
        return app

    async def check_key(self, request: Request) -> None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            raise HTTPException(401)

    async def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {"id": name, "max_model_len": self.context, "owned_by": self.owner}
                for name in MODELS
            ],
        }

    async def status(self) -> Response:
        """Reports that each request so far has mapped 3 pages and unmapped 2."""
        if not self.with_status:
            return JSONResponse({"detail": "Not Found"}, 404)
        if self.status_text is not None:
            return Response(self.status_text)
        served = len(self.requests)
        model = ModelReport(
            "good",
            "active",
            kv_mapped_bytes=served << 20,
            maps_total=100 + 3 * served,
            unmaps_total=50 + 2 * served,
            retractions_total=served,
        )
        agent = AgentReport("host:0", 1, 0.0, 1 << 30, 65536, 0, 0, served << 20, 1, 0, 2, [model])
        actions = {"activate": 4 + served, "evict": 1 + served}
        status = ClusterStatus(0.0, "prism", {}, [agent], actions_total=actions, ready=True)
        return Response(msgspec.json.encode(status), media_type="application/json")

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if body["model"] == "refused":
            error = {"message": "no room", "type": "server_error", "code": "unavailable"}
            return JSONResponse({"error": error}, 503)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight)
        try:
            async for event in events(body):
                yield event
        finally:
            self.in_flight -= 1


async def events(body: dict[str, Any]) -> AsyncIterator[str]:
    model, tokens = body["model"], body["max_tokens"]
    if model == "garbage":
        yield "data: {not json\n\n"
        return
    for number in range(tokens - (model == "short")):
        if model == "slow":
            await asyncio.sleep(SLOW_STEP_S)
        if model == "stuck" and number == 1:
            await asyncio.sleep(3600)
        if model == "dying" and number == 2:
            yield data({"error": {"message": "killed", "type": "engine", "code": "engine_died"}})
            return
        ids = {} if model == "textual" else {"token_ids": [7]}
        text = (
            "" if model == "textual" and number == 0 else "\x85\u2028" if model == "lines" else "x"
        )
        yield data({"choices": [{"text": text, "index": 0, "finish_reason": None, **ids}]})
    if model != "broken":
        yield data({"choices": [{"text": "", "index": 0, "finish_reason": "length"}]})
        yield data({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})
    yield "data: [DONE]\n\n"


def data(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


@contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serves on a free port or a Unix socket from a separate thread until the block ends."""
    config = uvicorn.Config(
        server.app(),
        host="127.0.0.1",
        port=0,
        uds=server.uds,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    process = server.process = uvicorn.Server(config)
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        while not process.started:
            if not thread.is_alive():
                raise RuntimeError("the scripted server did not start")
            threading.Event().wait(0.01)
        name = process.servers[0].sockets[0].getsockname()
        server.url = f"unix:{name}" if server.uds else f"http://127.0.0.1:{name[1]}"
        yield server
    finally:
        server.stop()
        thread.join()
