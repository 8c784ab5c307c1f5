"""The FastAPI application of one frontend process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware

from prism.config.resolved import ConfigFile
from prism.config.schema.admin import host_and_port
from prism.config.schema.cluster_config import ClusterConfig
from prism.frontend.api.admin import dashboard, health, reload_route
from prism.frontend.api.anthropic import messages
from prism.frontend.api.openai import chat, completions, embeddings, model_list, tokenize
from prism.frontend.api.responses import responses
from prism.frontend.config_watcher import watch
from prism.frontend.dispatch.dispatcher import Dispatcher
from prism.frontend.dispatch.rate_limits import RateLimits
from prism.frontend.dispatch.write_check import WriteCheck
from prism.frontend.external.proxy import ExternalProxy
from prism.frontend.external.servers import ExternalServers
from prism.frontend.http.access_control import ApiKeyGuard, CrossSiteGuard
from prism.frontend.http.calls import ID_HEADER, CallMiddleware
from prism.frontend.http.error_bodies import install_handlers
from prism.frontend.http.in_flight import InFlight
from prism.frontend.http.routing import add_plain
from prism.frontend.live_config import LiveConfig
from prism.frontend.metrics.request_metrics import Metrics
from prism.frontend.metrics.tracing import Traces
from prism.frontend.openapi import describe
from prism.frontend.requests.generation import Generation, GenerationSpec
from prism.frontend.requests.idempotency import SharedAnswers
from prism.frontend.requests.model_catalog import ModelCatalog
from prism.frontend.requests.specs import SpecBuilder
from prism.queueing.request_queue import RequestQueue


def create_app(
    config: ClusterConfig,
    frontend_id: str,
    without_unreadable: bool = False,
    file: ConfigFile | None = None,
) -> FastAPI:
    """Returns an application that serves `config`. It connects and loads tokenizers at startup.

    Args:
        without_unreadable: leave out models whose tokenizer cannot be loaded, until it can be.
        file: file that is watched for a newer configuration.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _running(app.state, config, frontend_id, without_unreadable):
            live, catalog = app.state.live, app.state.catalog
            tasks = [asyncio.create_task(catalog.retry_unreadable())]
            if file is not None:
                watching = watch(file, live, catalog, app.state.dispatcher)
                tasks.append(asyncio.create_task(watching))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    app = FastAPI(title="Prism", lifespan=lifespan, redoc_url=None)
    describe(app, has_keys=bool(config.keys))
    install_handlers(app)
    app.add_middleware(ExternalProxy)
    _add_middleware(app, config, config.frontend.cors_origins, has_keys=bool(config.keys))
    for plain in (completions, chat, responses, messages, embeddings, tokenize):
        add_plain(app, plain.router)
    for routes in (model_list, health):
        app.include_router(routes.router)
    if config.admin:
        app.add_route("/", lambda _: RedirectResponse("docs"), include_in_schema=False)
    else:
        _add_operators(app)
    return app


def create_admin(app: FastAPI, config: ClusterConfig) -> FastAPI:
    """Returns the application of the operators' pages, which shares the state of `app` and has a
    separate socket. A Unix socket needs no key: only the cluster's user may open its file."""
    admin = FastAPI(title="Prism", openapi_url=None)
    admin.state = app.state
    install_handlers(admin)
    is_port = host_and_port(config.admin) is not None
    _add_middleware(admin, config, origins=[], has_keys=is_port and bool(config.keys))
    admin.include_router(health.router)
    admin.include_router(reload_route.router)
    _add_operators(admin)
    return admin


def _add_operators(app: FastAPI) -> None:
    app.include_router(health.operators)
    app.include_router(dashboard.router)


def _add_middleware(
    app: FastAPI, config: ClusterConfig, origins: Sequence[str], *, has_keys: bool
) -> None:
    """Adds the middleware. The last one added is the outermost, so that a preflight is answered and
    logged before the other checks. `origins`: sites whose pages may send requests."""
    if has_keys:
        app.add_middleware(ApiKeyGuard, keys=lambda: app.state.live.config.keys)
    app.add_middleware(CrossSiteGuard, origins=origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[ID_HEADER, "retry-after"],
        )
    app.add_middleware(CallMiddleware, access_log=config.frontend.access_log)


@asynccontextmanager
async def _running(
    state: State, config: ClusterConfig, frontend_id: str, without_unreadable: bool
) -> AsyncIterator[None]:
    """Starts the parts of a frontend and stops them at exit. `state` has each part that routes use
    under its name. Raises ConfigError if a tokenizer cannot be loaded, unless `without_unreadable`.
    """
    catalog = await ModelCatalog.load(config.models, without_unreadable)
    live, in_flight = LiveConfig(config), InFlight()
    queue = RequestQueue.connect(config.redis_url, config.namespace)
    address = config.frontend.traces
    metrics = Metrics(Traces(address, frontend_id) if address else None)
    external = ExternalServers(live, queue, frontend_id)
    catalog.external_names = lambda: [name for name, _ in external.models()]
    dispatcher = Dispatcher(live, frontend_id, queue, metrics, external.loads)
    await dispatcher.start()
    rates = RateLimits(live, queue)

    def generate(spec: GenerationSpec) -> Generation:
        return Generation(spec, catalog.tokenizer(spec.model), dispatcher, metrics, rates)

    specs = SpecBuilder(live, catalog, dispatcher)
    answers = SharedAnswers(live, queue, frontend_id, in_flight, generate)
    writes = WriteCheck(queue)
    state.live, state.catalog, state.in_flight = live, catalog, in_flight
    state.queue, state.writes, state.dispatcher = queue, writes, dispatcher
    state.specs, state.answers = specs, answers
    state.external, state.rates, state.metrics = external, rates, metrics
    try:
        yield
    finally:
        await answers.close()
        await external.close()
        await writes.close()
        await specs.modules.close()
        await specs.images.close()
        await dispatcher.close()
        await queue.close()
        if metrics.traces is not None:
            await asyncio.to_thread(metrics.traces.close)
