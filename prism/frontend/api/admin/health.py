"""GET /health, /metrics and /status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from prism import clock
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import QueueUnavailableError
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.dispatch.write_check import WriteCheck
from prism.frontend.http.error_bodies import RETRY_AFTER_S
from prism.frontend.http.in_flight import InFlight
from prism.frontend.live_config import LiveConfig
from prism.frontend.metrics.cluster_metrics import ClusterCollector
from prism.frontend.metrics.request_metrics import render_samples
from prism.frontend.metrics.siblings import merged
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus
from prism.messages.troubles import read_troubles
from prism.queueing.request_queue import RequestQueue

router = APIRouter()
operators = APIRouter()

_STATUS_AGE_MIN_S = 10.0
_STATUS_AGE_INTERVALS = 4
_NAMES_MAX = 100
_WHY: dict[str, Any] = {
    "type": "object",
    "required": ["status", "reason"],
    "properties": {"status": {"const": "unavailable"}, "reason": {"type": "string"}},
}
_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "the cluster is not available; `reason` says why",
        "content": {"application/json": {"schema": _WHY}},
    }
}


@router.get("/health", responses=_UNAVAILABLE)
async def health(request: Request) -> JSONResponse:
    in_flight: InFlight = request.app.state.in_flight
    writes: WriteCheck = request.app.state.writes
    queue: RequestQueue = request.app.state.queue
    live: LiveConfig = request.app.state.live
    catalog: ModelCatalog = request.app.state.catalog
    if in_flight.draining:
        return _unavailable("shutting down")
    if refused := await writes.failure():
        return _unavailable(refused)
    try:
        published = await queue.status()
    except QueueUnavailableError as error:
        return _unavailable(str(error))
    if published is None:
        return _unavailable("starting: the cluster scheduler has not reported yet")
    silence = _silence(live.config, published)
    if not published.ready:
        return _unavailable(silence or f"starting: {_progress(live.config, published)}")
    # Devices continue to serve while the scheduler is silent.
    silent = {"scheduler": silence} if silence else {}
    # From the supervisor's file, since the status is old if the scheduler itself has failed.
    troubles = read_troubles(Path(live.config.run_dir))
    degraded = catalog.problems() | published.degraded | silent | troubles
    return JSONResponse({"status": "ready"} | ({"degraded": degraded} if degraded else {}))


@operators.get("/status", responses=_UNAVAILABLE)
async def status(request: Request) -> Response:
    queue: RequestQueue = request.app.state.queue
    published = await queue.status()
    if published is None:
        return JSONResponse({"status": "unavailable", "reason": "no status yet"}, 503)
    return Response(msgspec.json.encode(plain(published)), media_type="application/json")


@operators.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns the metrics. `?name[]=` selects samples by name, as in Prometheus' libraries."""
    writes: WriteCheck = request.app.state.writes
    queue: RequestQueue = request.app.state.queue
    dispatcher: Dispatcher = request.app.state.dispatcher
    takes_requests = not await writes.failure()
    names = tuple(sorted(set(request.query_params.getlist("name[]"))))[:_NAMES_MAX]
    try:
        published = await queue.status()
    except QueueUnavailableError:
        published = None
    frontends = await dispatcher.siblings.metrics(names)
    cluster = ClusterCollector(published, takes_requests)
    text = merged([*frontends, render_samples(cluster.registry, names)])
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def plain(value: Any) -> Any:
    """Returns wire structs as dicts with all fields (on the wire, defaults are omitted)."""
    if isinstance(value, msgspec.Struct):
        return {k: plain(v) for k, v in msgspec.structs.asdict(value).items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _unavailable(reason: str) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return JSONResponse({"status": "unavailable", "reason": reason}, 503, headers)


def _silence(config: ClusterConfig, published: ClusterStatus) -> str:
    """Returns an error if the scheduler does not report, or an empty string."""
    age_s = clock.unix_s() - published.time_unix_s
    limit_s = max(_STATUS_AGE_MIN_S, _STATUS_AGE_INTERVALS * config.scheduler.interval_s)
    return f"the cluster scheduler has not reported for {age_s:.0f} s" if age_s > limit_s else ""


def _progress(config: ClusterConfig, published: ClusterStatus) -> str:
    waiting = {d.name for d in config.devices} - {a.device for a in published.agents}
    parts = [f"{name}: no agent yet" for name in sorted(waiting)]
    return "; ".join(parts + [_device_progress(agent) for agent in published.agents])


def _device_progress(agent: AgentReport) -> str:
    up = agent.engines_total - agent.engines_starting
    models = [f"{m.model} {m.state}{f' ({m.error})' if m.error else ''}" for m in agent.models]
    return (
        f"{agent.device}: engines {up}/{agent.engines_total} up, {', '.join(models) or 'no model'}"
    )
