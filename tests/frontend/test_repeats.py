"""Requests that are repeated with their Idempotency-Key: one answer, computed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request as HttpRequest

from prism.frontend.app import create_app
from prism.frontend.protocol.chat_types import ChatBody
from prism.frontend.requests.idempotency import read_key
from prism.messages.requests import Chunk, Failure, Request
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, listening, make_config, stack_of
from tests.frontend.scripted_agent import answering, died, rest, tokens
from tests.frontend.test_completions import events
from tests.frontend.test_faults import until

KEY = {"Idempotency-Key": "my-secret-key"}
BODY = {"model": "base", "prompt": "hello", "max_tokens": 60, "return_token_ids": True}
TEXT = "the quick brown fox"
IDS = [*ids_of(TEXT), 0]


class Gate:
    """Script that sends two tokens, and the rest once `open` is set."""

    def __init__(self) -> None:
        self.began, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Request) -> AsyncIterator[Chunk | Failure]:
        yield tokens(request, 0, IDS[:2])
        self.began.set()
        await self.open.wait()
        yield tokens(request, 2, IDS[2:], "stop")


async def post(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY | changes, headers=KEY)


async def streamed(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    json = BODY | {"stream": True}
    async with client.stream("POST", "/v1/completions", json=json, headers=KEY) as response:
        assert response.status_code == 200
        return await events(response)


@asynccontextmanager
async def another_frontend(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        listening(create_app(stack.state.live.config, "f1")) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield client


async def written(stack: Stack) -> bytes:
    """Returns all keys and values in Redis."""
    redis = stack.state.queue._redis
    found = b""
    async for key in redis.scan_iter(stack.state.queue._prefix + "*"):
        found += key + (await redis.dump(key) or b"")
    return found


async def test_what_has_ended_is_answered_again(stack: Stack) -> None:
    stack.agent.script = answering(IDS, step=2)
    first = await post(stack.client)
    async with another_frontend(stack) as other:
        again = [await post(stack.client), await post(other)]
    assert first.json()["choices"][0]["text"] == TEXT
    assert [each.json() for each in again] == [first.json()] * 2
    assert len(stack.agent.seen) == 1
    known = await written(stack)
    assert b"answer:" in known
    for secret in (b"my-secret-key", b"hello", TEXT.encode()):
        assert secret not in known


async def test_a_stream_is_streamed_again(stack: Stack) -> None:
    stack.agent.script = answering(IDS)
    first, again = await streamed(stack.client), await streamed(stack.client)
    assert {event["id"] for event in first + again} == {first[0]["id"]}
    assert {event["created"] for event in first + again} == {first[0]["created"]}
    for each in (first, again):
        assert [i for event in each for i in event["choices"][0]["token_ids"]] == IDS
        assert "".join(event["choices"][0]["text"] for event in each) == TEXT
    assert len(stack.agent.seen) == 1


async def test_stop_strings_end_it_at_the_same_place(stack: Stack) -> None:
    stack.agent.script = answering(IDS)
    first, again = [await post(stack.client, stop=["brown"]) for _ in range(2)]
    assert first.json()["choices"][0]["text"] == "the quick "
    assert again.json() == first.json()
    assert len(stack.agent.seen) == 1


async def test_what_runs_is_joined(stack: Stack) -> None:
    """Joins it at the same frontend while it runs, and at another one when it has ended."""
    gate = stack.agent.script = Gate()
    async with another_frontend(stack) as other:
        jobs = [asyncio.create_task(post(stack.client))]
        await gate.began.wait()
        jobs += [asyncio.create_task(post(stack.client)), asyncio.create_task(post(other))]
        await asyncio.sleep(0.3)
        assert not any(job.done() for job in jobs)
        gate.open.set()
        answers = [(await job).json() for job in jobs]
    assert answers == [answers[0]] * 3
    assert answers[0]["choices"][0]["token_ids"] == IDS
    assert len(stack.agent.seen) == 1


async def test_a_client_that_went_away_finds_its_answer(stack: Stack) -> None:
    gate = stack.agent.script = Gate()
    with suppress(httpx.ReadTimeout):
        async with httpx.AsyncClient(base_url=stack.url, timeout=0.3) as hasty:
            await post(hasty)
    await gate.began.wait()
    gate.open.set()
    answer = await post(stack.client)
    assert answer.json()["choices"][0]["token_ids"] == IDS
    assert len(stack.agent.seen) == 1
    assert not stack.agent.cancelled


@pytest.mark.parametrize("running", [True, False])
async def test_another_body_is_refused(stack: Stack, running: bool) -> None:
    gate = stack.agent.script = Gate()
    first = asyncio.create_task(post(stack.client))
    await gate.began.wait()
    if not running:
        gate.open.set()
        await first
    async with another_frontend(stack) as other:
        for client in (stack.client, other):
            refused = await post(client, prompt="bye")
            assert refused.status_code == 422
            assert refused.json()["error"]["code"] == "idempotency_key_reused"
            assert "send a new key" in refused.json()["error"]["message"]
    gate.open.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_has_a_length(stack: Stack, key: str) -> None:
    answer = await stack.client.post("/v1/completions", json=BODY, headers={"Idempotency-Key": key})
    assert answer.status_code == 400
    assert "Idempotency-Key: give 1 to 255" in answer.json()["error"]["message"]


async def test_a_key_covers_the_places_of_images() -> None:
    scope = {"type": "http", "path": "/v1", "headers": [(b"idempotency-key", b"k")]}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    texts = [{"type": "text", "text": text} for text in ("a", "b")]
    contents = [
        (image, *texts), (texts[0], image, texts[1]), (*texts, image), (*texts,),
        ({"type": "text", "text": "a\nb"}, image),
    ]  # fmt: skip
    bodies = [
        ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": [*each]}]})
        for each in contents
    ]
    keys = [await read_key(HttpRequest(scope), body) for body in bodies]
    assert len({key.fingerprint for key in keys if key}) == len(contents)


async def test_an_error_is_not_kept(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        yield died(request, False) if len(stack.agent.seen) == 1 else rest(request, IDS)

    stack.agent.script = script
    assert (await post(stack.client)).status_code == 503
    answer = await post(stack.client)
    assert answer.json()["choices"][0]["token_ids"] == IDS


async def test_what_never_began_leaves_nothing(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir, max_open_requests=2)
    async with stack_of(config) as stack:
        body = {"model": "base", "prompt": "x"}
        first = asyncio.create_task(stack.client.post("/v1/completions", json=body))
        await until(lambda: len(stack.state.dispatcher.log) == 1)
        assert (await post(stack.client, prompt=["a", "b"])).status_code == 429
        first.cancel()
        await until(lambda: not len(stack.state.dispatcher.log))
        stack.agent.script = answering(IDS)
        await until(lambda: not stack.state.answers._runs)
        assert b"claims" not in await written(stack)
        assert (await post(stack.client)).json()["choices"][0]["text"] == TEXT


async def test_what_a_dead_frontend_left_is_computed_once(stack: Stack) -> None:
    """Claims end with their frontend; the test removes it, as the launcher would."""
    stack.agent.script = answering(IDS)
    queue = stack.state.queue
    await queue.beat("dead", 30)
    key = await claimed(stack)
    await queue.settle(key[0], "f0", None, 1)
    assert await queue.claim(*key[:1], "dead", key[1], 30) is None
    async with another_frontend(stack) as other:
        jobs = [asyncio.create_task(post(client)) for client in (stack.client, other)]
        await asyncio.sleep(0.3)
        assert not stack.agent.seen
        await queue.remove_frontend("dead")
        answers = [(await job).json() for job in jobs]
    assert answers[0] == answers[1]
    assert len(stack.agent.seen) == 1


async def claimed(stack: Stack) -> tuple[str, str]:
    """Returns the key and fingerprint of a request that never runs."""
    found: list[tuple[str, str]] = []
    claim = stack.state.queue.claim

    async def note(key: str, frontend_id: str, fingerprint: str, ttl_s: float) -> Any:
        found.append((key, fingerprint))
        await asyncio.Event().wait()

    stack.state.queue.claim = note
    with suppress(httpx.ReadTimeout):
        async with httpx.AsyncClient(base_url=stack.url, timeout=0.3) as hasty:
            await post(hasty)
    stack.state.queue.claim = claim
    return found[0]
