"""A frontend on a real port, a real Redis, and a scripted agent, in the test's event loop."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State

from prism.config.schema.cluster_config import (
    ClusterConfig,
    DeviceConfig,
    EngineConfig,
    FrontendConfig,
)
from prism.frontend.__main__ import UvicornServer
from prism.frontend.app import create_app
from prism.messages.model_spec import ModelSpec
from prism.queueing.server import BundledRedis
from tests.frontend.scripted_agent import ScriptedAgent
from tests.frontend.tiny_model import make_model, tokenizer

TOKENIZER = tokenizer()


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@dataclass
class Stack:
    """client: httpx to the frontend at `url`."""

    url: str
    client: httpx.AsyncClient
    agent: ScriptedAgent
    state: State  # the parts of the frontend


def make_spec(name: str, path: Path, context_length: int = 256) -> ModelSpec:
    return ModelSpec(
        name=name,
        path=str(path),
        architecture="LlamaForCausalLM",
        dtype="float32",
        kv_dtype="float32",
        context_length=context_length,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        weight_bytes=1 << 16,
        token_bytes=256,
        slo_ttft_s=2.0,
        slo_tpot_s=0.2,
    )


def make_config(url: str, namespace: str, run_dir: Path, **frontend: float) -> ClusterConfig:
    base = make_model(run_dir / "base-model", chat=False)
    chat = make_model(run_dir / "chat-model")
    return ClusterConfig(
        namespace=namespace,
        run_dir=str(run_dir),
        redis_url=url,
        policy="prism",
        devices=[DeviceConfig("host:0", 1 << 26, 1 << 16, 1)],
        models=[make_spec("chat", chat), make_spec("base", base)],
        engine=EngineConfig(adapter="fake", drain_timeout_s=5.0),
        frontend=FrontendConfig(**frontend),  # type: ignore[arg-type]
    )


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """Serves `app` on a free port and yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = UvicornServer(uvicorn.Config(app, log_config=None, lifespan="off"))
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def stack_of(config: ClusterConfig) -> AsyncIterator[Stack]:
    app = create_app(config, "f0")
    async with (
        ScriptedAgent(config) as agent,
        listening(app) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield Stack(url, client, agent, app.state)


@pytest.fixture
async def stack(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> AsyncIterator[Stack]:
    async with stack_of(make_config(redis_server.url, namespace, short_dir)) as made:
        yield made


@pytest.fixture(scope="module")
def parser_modules() -> Iterator[None]:
    """Drops the parsers' stand-ins from sys.modules: other tests import the real SGLang."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("sglang", "xgrammar"):
            del sys.modules[name]
    for name in ("parsers", "parser_library"):
        sys.modules.pop(f"prism.engines.sglang.grammars.{name}", None)
