"""Requests whose images are still being prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers.processors import TemplateProcessing

from prism.frontend.__main__ import drain
from prism.frontend.http import calls
from prism.frontend.http.calls import Call
from prism.frontend.http.error_bodies import OverloadedError
from prism.frontend.images import client as images_client
from prism.frontend.images.client import ImageClient
from prism.frontend.images.preparation import PreparedImage
from prism.frontend.requests.prompt_images import PromptImages
from prism.messages.model_spec import ImageSpec
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, make_config, make_spec, stack_of
from tests.frontend.scripted_agent import answering
from tests.frontend.test_faults import until
from tests.frontend.test_reload import WHOLE, reload
from tests.frontend.tiny_model import EOS

URL = "data:image/png;base64,AAAA"
CHAT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
ANTHROPIC = [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]
ITEMS = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": ANTHROPIC, "max_tokens": 20},
    "/v1/responses": {"input": ITEMS},
    "/v1/messages/count_tokens": {"messages": ANTHROPIC},
    "/tokenize": {"messages": CHAT},
}
GENERATING = list(BODIES)[:3]


class Gate:
    """Preparation of all images, which waits."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.began = self.cancelled = 0

    async def prompt(
        self, model: Any, token: int, body: Any, ids: list[int]
    ) -> tuple[list[int], tuple[()]]:
        self.began += 1
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ids, ()


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(PromptImages, "prompt", lambda _, *given: made.prompt(*given))
    return made


@pytest.fixture
async def stack(redis_server: BundledRedis, namespace: str, short_dir: Any) -> AsyncIterator[Stack]:
    """Yields a cluster whose model `chat` takes images."""
    config = make_config(redis_server.url, namespace, short_dir)
    chat, base = config.models
    models = [replace(chat, images=ImageSpec(1), aliases=("named",)), base]
    async with stack_of(replace(config, models=models)) as made:
        made.agent.script = answering(WHOLE)
        yield made


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_goes_ends_its_preparation(stack: Stack, gate: Gate, path: str) -> None:
    sent = stack.client.post(path, json={"model": "chat", **BODIES[path]})
    asking = asyncio.create_task(sent)
    await until(lambda: gate.began == 1)
    assert stack.state.in_flight.busy
    asking.cancel()
    await until(lambda: not stack.state.in_flight.busy)
    assert gate.cancelled == 1
    assert stack.agent.seen == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
async def test_draining_waits_for_it(stack: Stack, gate: Gate, path: str, stream: bool) -> None:
    body = {"model": "chat", "stream": stream, **BODIES[path]}
    asking = asyncio.create_task(stack.client.post(path, json=body))
    await until(lambda: gate.began == 1)
    in_flight, dispatcher = stack.state.in_flight, stack.state.dispatcher
    draining = asyncio.create_task(drain(in_flight, dispatcher, asyncio.Queue(), 20.0))
    await until(lambda: in_flight.draining)
    refused = await stack.client.post(path, json=body)
    assert (refused.status_code, gate.began) == (503, 1)
    assert not draining.done()
    gate.opened.set()
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert "dog" in answer.text
    await asyncio.wait_for(draining, 10)


async def test_draining_waits_for_one_with_a_key(stack: Stack, gate: Gate) -> None:
    body, headers = {"model": "chat", "messages": CHAT}, {"Idempotency-Key": "k"}
    sent = stack.client.post("/v1/chat/completions", json=body, headers=headers)
    asking = asyncio.create_task(sent)
    await until(lambda: gate.began == 1)
    state = stack.state
    draining = asyncio.create_task(drain(state.in_flight, state.dispatcher, asyncio.Queue(), 20.0))
    await until(lambda: state.in_flight.draining)
    gate.opened.set()
    assert (await asking).status_code == 200
    await asyncio.wait_for(draining, 10)


async def test_an_alias_that_moves_meanwhile_changes_nothing(stack: Stack, gate: Gate) -> None:
    config = stack.state.live.config
    body = {"model": "named", "messages": CHAT}
    asking = asyncio.create_task(stack.client.post("/v1/chat/completions", json=body))
    await until(lambda: gate.began == 1)
    chat, base = config.models
    moved = [replace(chat, aliases=()), replace(base, aliases=("named",))]
    await reload(stack, replace(config, models=moved, revision=1))
    gate.opened.set()
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert [request.model for request in stack.agent.seen] == ["chat"]


async def test_special_tokens_are_added_as_without_images(stack: Stack, gate: Gate) -> None:
    tokenizer = stack.state.catalog.tokenizers["chat"].tokenizer
    tokenizer.post_processor = TemplateProcessing(f"{EOS} $A", special_tokens=[(EOS, 0)])
    gate.opened.set()
    made = []
    for asked in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        body = {"model": "chat", "messages": CHAT, **asked}
        answer = await stack.client.post("/tokenize", json=body)
        made.append(answer.json()["tokens"])
    plain = made[0]
    assert plain
    assert made == [plain, plain, [0, *plain]]


async def test_the_places_of_a_client_are_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Has no process: the order of the images and their places alone are under test."""
    opened, order = asyncio.Event(), []

    async def prepared(_: ImageClient, asked: Any, timeout_s: float) -> PreparedImage:
        await opened.wait()
        order.append(asked.data)
        return PreparedImage("", [], {})

    monkeypatch.setattr(ImageClient, "_start", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(ImageClient, "_prepared", prepared)
    monkeypatch.setattr(images_client, "WAITING_OF_A_CLIENT_MAX", 3)
    client, model = ImageClient(), make_spec("vision", tmp_path)

    async def ask(name: str, data: bytes) -> PreparedImage:
        calls.current.set(Call(name, client=name))
        return await client.prepare(model, data, 1, 1.0)

    held = [asyncio.create_task(ask("one", b"%d" % number)) for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many images are waiting"):
        await asyncio.create_task(ask("one", b"more"))
    other = asyncio.create_task(ask("two", b"other"))
    await until(lambda: client._clients["two"] == 1)
    for task in held:
        task.cancel()  # they give their places to others
    await asyncio.wait(held)
    assert client._clients == {"one": 1, "two": 1}  # the one that is being prepared continues
    opened.set()
    await other
    assert order == [b"0", b"other"]
    assert not client._clients
    await client.close()
