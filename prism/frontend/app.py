"""The FastAPI application of one frontend process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from prism.config import ClusterConfig
from prism.frontend.cluster_metrics import ClusterCollector
from prism.frontend.dispatcher import Dispatcher
from prism.frontend.errors import install_handlers
from prism.frontend.metrics import Metrics
from prism.frontend.routes import chat, completions, health, models
from prism.frontend.services import Services
from prism.frontend.tokenizers import load_tokenizers
from prism.queueing.requests import RequestQueue


def create_app(config: ClusterConfig, frontend_id: str) -> FastAPI:
    """An application that serves `config`; it connects and loads tokenizers at its start-up."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_services(config, frontend_id) as found:
            app.state.services = found
            yield

    app = FastAPI(title="Prism", lifespan=lifespan, docs_url=None, redoc_url=None)
    install_handlers(app)
    for routes in (models, completions, chat, health):
        app.include_router(routes.router)
    return app


@asynccontextmanager
async def running_services(config: ClusterConfig, frontend_id: str) -> AsyncIterator[Services]:
    """Raises ConfigError where a tokenizer cannot be loaded."""
    tokenizers = await asyncio.to_thread(load_tokenizers, config.models)
    queue = RequestQueue.connect(config.redis_url, config.namespace)
    metrics = Metrics()
    dispatcher = Dispatcher(config, frontend_id, queue, metrics)
    await dispatcher.start()
    try:
        yield Services(
            config=config,
            queue=queue,
            dispatcher=dispatcher,
            metrics=metrics,
            cluster=ClusterCollector(),
            tokenizers=tokenizers,
            started_unix_s=int(time.time()),
        )
    finally:
        await dispatcher.close()
        await queue.close()
