"""Names of models in requests: aliases and LoRA adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from prism.config.schema.access import ApiKey, hashed
from prism.messages.model_spec import LoraAdapter, LoraSpec
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering

BASE, ADAPTER, ROOT = ("key-of-" + name + "-1234567890" for name in ("base", "adapter", "root"))
KEYS = [
    ApiKey("base", hashed(BASE), models=["chat"]),
    ApiKey("adapter", hashed(ADAPTER), models=["chat:pirate"]),
    ApiKey("root", hashed(ROOT), operator=True),
]
SAID: Any = [{"role": "user", "content": "hello"}]
# Path, body, and where its answer says the model.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": SAID, "max_tokens": 9},
}


@pytest.fixture
async def named(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> AsyncIterator[Stack]:
    config = make_config(redis_server.url, namespace, short_dir)
    lora = LoraSpec((LoraAdapter("pirate", "/nowhere", 4), LoraAdapter("poet", "/nowhere", 4)))
    chat, base = config.models
    models = [msgspec.structs.replace(chat, aliases=("prod",), lora=lora), base]
    async with stack_of(msgspec.structs.replace(config, models=models, keys=KEYS)) as stack:
        stack.agent.script = answering([*ids_of("yes"), 0])
        yield stack


async def post(stack: Stack, path: str, model: str, key: str = ROOT) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return await stack.client.post(path, json={"model": model, **ROUTES[path]}, headers=headers)


async def listed(stack: Stack, key: str) -> list[tuple[str, str, str | None]]:
    answer = await stack.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    return [(card["id"], card["root"], card["parent"]) for card in answer.json()["data"]]


@pytest.mark.parametrize("path", ROUTES)
async def test_requests_go_to_the_model_with_the_adapter(named: Stack, path: str) -> None:
    """Uses the model's queue, SLOs and metrics; the answer has the requested name."""
    for name, adapter in (("chat", ""), ("prod", ""), ("chat:pirate", "pirate")):
        answer = await post(named, path, name)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        request = named.agent.seen[-1]
        assert (request.model, request.lora) == ("chat", adapter)
        assert (request.slo_ttft_s, request.slo_tpot_s) == (2.0, 0.2)
    metrics = (await named.client.get("/metrics", headers={"x-api-key": ROOT})).text
    counted = [x for x in metrics.splitlines() if x.startswith("prism_requests_total{")]
    assert {'model="chat"' in line for line in counted} == {True}
    assert sum(float(line.split()[-1]) for line in counted) == 3


async def test_streams_have_the_name_that_was_asked_for(named: Stack) -> None:
    body = {"model": "chat:poet", "prompt": "hello", "stream": True}
    answer = await named.client.post("/v1/completions", json=body, headers={"x-api-key": ROOT})
    events = [x for x in answer.text.splitlines() if x.startswith("data: {")]
    assert events
    assert all('"model":"chat:poet"' in event for event in events)


async def test_names_are_listed_and_unknown_ones_refused(named: Stack) -> None:
    everything = [
        ("chat", "chat", None),
        ("chat:pirate", "chat:pirate", "chat"),
        ("chat:poet", "chat:poet", "chat"),
        ("prod", "chat", None),
        ("base", "base", None),
    ]
    assert await listed(named, ROOT) == everything
    card = await named.client.get("/v1/models/chat:poet", headers={"x-api-key": ROOT})
    assert (card.json()["parent"], card.json()["max_model_len"]) == ("chat", 256)
    for name in ("chat:nobody", "base:pirate", "prod:pirate", "pirate", "chat:", ":pirate"):
        refused = await post(named, "/v1/completions", name)
        assert refused.status_code == 404
        assert "available models: chat, chat:pirate, chat:poet, prod, base" in refused.text


async def test_tokens_are_counted_for_every_name(named: Stack) -> None:
    for name in ("prod", "chat:pirate"):
        body = {"model": name, "prompt": "hello"}
        answer = await named.client.post("/tokenize", json=body, headers={"x-api-key": ROOT})
        assert answer.json()["tokens"] == ids_of("hello")


async def test_keys_name_adapters_one_by_one(named: Stack) -> None:
    """Aliases count as the model itself."""
    assert await listed(named, BASE) == [("chat", "chat", None), ("prod", "chat", None)]
    assert await listed(named, ADAPTER) == [("chat:pirate", "chat:pirate", "chat")]
    allowed = {BASE: ("chat", "prod"), ADAPTER: ("chat:pirate",)}
    for key, names in allowed.items():
        for name in ("chat", "prod", "chat:pirate", "chat:poet"):
            answer = await post(named, "/v1/completions", name, key)
            assert answer.status_code == (200 if name in names else 404)
