"""A frontend takes over a configuration while requests are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema.access import ApiKey, hashed
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import UnknownModelError
from prism.frontend.config_watcher import apply_config, watch
from prism.messages.requests import Chunk, Failure, Request
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, make_spec, stack_of
from tests.frontend.scripted_agent import answering, rest
from tests.frontend.test_faults import BODY, until

WHOLE = [*ids_of("the lazy dog"), 0]


async def reload(stack: Stack, config: ClusterConfig) -> None:
    state = stack.state
    await apply_config(config, state.live, state.catalog, state.dispatcher)


async def test_a_removed_model_ends_what_is_open_and_takes_no_more(stack: Stack) -> None:
    state, config = stack.state, stack.state.live.config
    release = asyncio.Event()

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        await release.wait()
        yield rest(request, WHOLE)

    stack.agent.script = script
    body = {**BODY, "temperature": 0}
    open_ = asyncio.create_task(stack.client.post("/v1/completions", json=body))
    await until(lambda: len(stack.agent.seen) == 1)
    chat_only = [config.model("chat")]
    await reload(stack, replace(config, models=chat_only, revision=1))

    async def says(*announced: object) -> None:
        while True:
            known = (await state.queue.frontends()).values()
            if [(each.revision, each.leaving) for each in known] == [announced]:
                return
            await asyncio.sleep(0.01)

    async with asyncio.timeout(10):
        await says(1, ["base"])
    refused = await stack.client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    release.set()
    answer = await open_
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "the lazy dog"
    async with asyncio.timeout(10):
        await says(1, [])
    # A request that was read before the reload and is enqueued only now.
    with pytest.raises(UnknownModelError):
        state.catalog.tokenizer("base")


async def test_a_model_is_added_and_bounds_change(stack: Stack) -> None:
    config = stack.state.live.config
    stack.agent.script = answering(WHOLE)
    base = config.model("base")
    added = make_spec("added", Path(base.path))
    broken = make_spec("broken", Path(base.path) / "nowhere")
    frontend = replace(config.frontend, max_open_requests=1)
    models = [base, added, broken]
    await reload(stack, replace(config, models=models, frontend=frontend, revision=1))
    await stack.agent.route("added")
    ids = [model["id"] for model in (await stack.client.get("/v1/models")).json()["data"]]
    assert ids == ["base", "added", "broken"]
    answer = await stack.client.post("/v1/completions", json={**BODY, "model": "added"})
    assert answer.status_code == 200, answer.text
    unreadable = await stack.client.post("/v1/completions", json={**BODY, "model": "broken"})
    assert unreadable.json()["error"]["code"] == "model_unavailable"
    batch = await stack.client.post("/v1/completions", json={**BODY, "prompt": ["x", "y"]})
    assert (batch.status_code, "at most 1 of base" in batch.text) == (400, True)


async def test_keys_come_and_go(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    """Reads them from the file that all processes watch."""
    old, new = ApiKey("old", hashed("o" * 30)), ApiKey("new", hashed("n" * 30))
    config = replace(make_config(redis_server.url, namespace, short_dir), keys=[old])
    path = short_dir / "cluster.json"
    async with stack_of(config) as stack:

        async def statuses() -> list[int]:
            headers = [{"Authorization": f"Bearer {letter * 30}"} for letter in "on"]
            models = [await stack.client.get("/v1/models", headers=each) for each in headers]
            return [each.status_code for each in models]

        assert await statuses() == [200, 401]
        parts = (stack.state.live, stack.state.catalog, stack.state.dispatcher)
        watching = asyncio.create_task(watch(ConfigFile(path, config), *parts))
        write_resolved(replace(config, keys=[new], revision=1), path)
        async with asyncio.timeout(10):
            while await statuses() != [401, 200]:
                await asyncio.sleep(0.01)
        watching.cancel()
