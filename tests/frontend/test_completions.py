"""Completions over a real socket: text, streams, usage, defaults, the openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import accumulate, count
from typing import Any, cast

import httpx
import openai
import pytest

from prism.frontend.dispatch import receiving
from prism.messages.requests import Chunk, EngineOutput, Failure, Request
from tests.frontend.conftest import Stack, ids_of
from tests.frontend.scripted_agent import answering, tokens

TEXT = "the quick brown fox, größer als 1 €, 😀!"


async def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the stream's events; checks that it ends with [DONE]."""
    lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def stream(stack: Stack, path: str, **body: Any) -> list[dict[str, Any]]:
    async with stack.client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return await events(response)


async def test_a_completion(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of(TEXT), 0])
    body = {"model": "base", "prompt": "hello", "max_tokens": 200, "temperature": 0, "seed": 3}
    response = await stack.client.post("/v1/completions", json=body)
    answer = response.json()
    assert response.status_code == 200
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}
    ]
    prompt, output = len(ids_of("hello")), len(ids_of(TEXT)) + 1
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["completion_tokens"] == output
    assert answer["usage"]["total_tokens"] == prompt + output
    request = stack.agent.seen[0]
    assert request.prompt_ids == ids_of("hello")
    assert request.sampling.stop_token_ids == (0,)
    assert (request.sampling.temperature, request.sampling.seed) == (0, 3)
    assert (request.slo_ttft_s, request.slo_tpot_s) == (2.0, 0.2)


async def test_without_max_tokens_the_context_is_the_limit(stack: Stack) -> None:
    stack.agent.script = answering([5])
    await stack.client.post("/v1/completions", json={"model": "base", "prompt": [9, 9, 9]})
    assert stack.agent.seen[0].sampling.max_tokens == 256 - 3


async def test_per_request_slo_and_ignore_eos(stack: Stack) -> None:
    stack.agent.script = answering([5])
    body = {"model": "base", "prompt": "x", "slo_ttft_ms": 150, "slo_tpot_ms": 12.5}
    await stack.client.post("/v1/completions", json={**body, "ignore_eos": True})
    request = stack.agent.seen[0]
    assert (request.slo_ttft_s, request.slo_tpot_s) == (0.15, 0.0125)
    assert request.sampling.ignore_eos
    assert request.sampling.stop_token_ids == ()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
async def test_a_stream_joins_to_the_same_text(stack: Stack, step: int) -> None:
    stack.agent.script = answering(ids_of(TEXT), "length", step)
    got = await stream(stack, "/v1/completions", model="base", prompt="p")
    assert "".join(e["choices"][0]["text"] for e in got) == TEXT
    assert [e["choices"][0]["finish_reason"] for e in got][-1] == "length"
    assert all("\ufffd" not in e["choices"][0]["text"] for e in got)
    assert all("usage" not in e for e in got)
    assert len(got) <= -(-len(ids_of(TEXT)) // step)  # what came late came together


async def test_steps_of_many_streams_share_events(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses a late frontend, here until the test has sent two more steps."""
    rested, ids, agent = asyncio.Event(), ids_of(TEXT)[:3], stack.agent
    monkeypatch.setattr(receiving, "_pause", lambda _: rested.wait())
    monkeypatch.setattr(receiving, "_LATE_IN_A_ROW", 0)
    choices = receiving._MANY_CHUNKS // 4
    body: dict[str, Any] = {"model": "base", "prompt": "p", "n": choices, "return_token_ids": True}
    streams = asyncio.gather(*(stream(stack, "/v1/completions", **body) for _ in range(4)))
    async with asyncio.timeout(30):
        while len(agent.seen) < receiving._MANY_CHUNKS:
            await asyncio.sleep(0.01)
    for number, token_id in enumerate(ids):
        reason = "length" if number == 2 else None
        await agent.send("f0", *(tokens(r, number, [token_id], reason) for r in agent.seen))
        await asyncio.sleep(0.3)
    assert not streams.done()
    rested.set()
    for got in await streams:
        shown = [event["choices"][0]["token_ids"] for event in got]
        assert shown == [ids[:1]] * choices + [ids[1:]] * choices


class ScriptedInbox:
    """Inbox of steps of 256 streams.

    `on_time` steps arrive after the previous step was written. During each of the `late` writes
    that follow, several more arrive.
    """

    def __init__(self, on_time: int, late: int, behind: int) -> None:
        self._numbers = count()
        self._on_time, self._late, self._behind = on_time, late, behind
        self._asked = 0
        self.is_empty = asyncio.Event()

    async def receive(self) -> tuple[bytes, EngineOutput]:
        if not self._on_time:
            self.is_empty.set()
            await asyncio.Event().wait()
        self._on_time -= 1
        return b"", self._step()

    def arrived(self) -> list[EngineOutput]:
        """Returns the steps that have arrived; the dispatcher asks before and after each write."""
        self._asked += 1
        if self._on_time or self._asked % 2 or not self._late:
            return []
        self._late -= 1
        return [self._step() for _ in range(self._behind)]

    def _step(self) -> EngineOutput:
        number = next(self._numbers)
        return EngineOutput([Chunk(f"r{n}", 1, number, [5], None) for n in range(256)])


@pytest.mark.parametrize(
    ("steps", "rests"),
    [((9, 0, 0), 0), ((1, 9, 1), 0), ((1, 2, 2), 0), ((1, 3, 2), 1), ((1, 5, 2), 3)],
)
async def test_a_frontend_rests_only_where_it_is_late(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int, int], rests: int
) -> None:
    """Rests when two more steps arrive during each of three writes, however large a step is."""
    rested: list[float] = []

    async def rest(wrote_s: float) -> None:
        rested.append(wrote_s)

    inbox = ScriptedInbox(*steps)
    monkeypatch.setattr(receiving, "_pause", rest)
    deliver = stack.state.dispatcher._deliver
    task = asyncio.create_task(receiving.receive(cast("Any", inbox), deliver))
    async with asyncio.timeout(30):
        await inbox.is_empty.wait()
    task.cancel()
    assert len(rested) == rests


async def test_what_came_while_nobody_took_it_comes_as_one_event_per_choice(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        ids = ids_of(TEXT)
        pieces = (tokens(request, index, [token_id]) for index, token_id in enumerate(ids))
        await stack.agent.send(request.frontend_id, *pieces)
        yield tokens(request, len(ids), [0], "stop")

    stack.agent.script = script
    got = await stream(stack, "/v1/completions", model="base", prompt=["a", "b"], max_tokens=200)
    by_choice = [[e["choices"][0] for e in got if e["choices"][0]["index"] == i] for i in (0, 1)]
    for choices in by_choice:
        assert "".join(choice["text"] for choice in choices) == TEXT
        assert choices[-1]["finish_reason"] == "stop"
        assert len(choices) <= 2


async def test_stream_with_usage_and_token_ids(stack: Stack) -> None:
    ids = ids_of("€uro")
    stack.agent.script = answering(ids)
    options: dict[str, Any] = {
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    got = await stream(stack, "/v1/completions", model="base", prompt="p", **options)
    assert [i for e in got[:-1] for i in e["choices"][0]["token_ids"]] == ids
    assert all(e["usage"] is None for e in got[:-1])
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == len(ids)
    options["stream_options"] |= {"continuous_usage_stats": True, "include_obfuscation": False}
    got = await stream(stack, "/v1/completions", model="base", prompt="p", **options)
    counts = [e["usage"]["completion_tokens"] for e in got]
    shown = list(accumulate(len(e["choices"][0]["token_ids"]) for e in got[:-1]))
    assert counts == [*shown, len(ids)]


async def test_several_prompts_are_several_choices(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        yield tokens(request, 0, [request.prompt_ids[0], 0], "stop")

    stack.agent.script = script
    body = {"model": "base", "prompt": [ids_of("a"), ids_of("b"), ids_of("c")]}
    answer = (await stack.client.post("/v1/completions", json=body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert answer["usage"]["completion_tokens"] == 6
    got = await stream(stack, "/v1/completions", **{**body, "prompt": ["a", "b"]})
    texts = {e["choices"][0]["index"]: e["choices"][0]["text"] for e in got}
    assert texts == {0: "a", 1: "b"}


async def test_chat_renders_the_models_template(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of("Hi."), 0])
    parts = [{"type": "text", "text": "who"}, {"type": "text", "text": "are you?"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "me", "refusal": None, "tool_calls": None},
    ]
    body = {"model": "chat", "messages": messages, "max_completion_tokens": 8}
    answer = (await stack.client.post("/v1/chat/completions", json=body)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Hi."
    assert answer["choices"][0]["finish_reason"] == "stop"
    expected = "[system] be brief\n[user] who\nare you?\n[assistant] me\n[assistant] "
    assert stack.agent.seen[0].prompt_ids == ids_of(expected)
    assert stack.agent.seen[0].sampling.max_tokens == 8


async def test_chat_stream_begins_with_the_role(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of("Hi."), 0])
    messages = [{"role": "user", "content": "hey"}]
    got = await stream(stack, "/v1/chat/completions", model="chat", messages=messages)
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"]["content"] for e in got) == "Hi."
    assert {e["object"] for e in got} == {"chat.completion.chunk"}
    assert len({e["id"] for e in got}) == 1


async def test_the_openai_client(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of(TEXT), 0])
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        assert [m.id async for m in client.models.list()] == ["chat", "base"]
        completion = await client.completions.create(model="base", prompt="x", stop=["zzz"])
        assert completion.choices[0].text == TEXT
        chat = await client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"slo_ttft_ms": 100},
        )
        chunks = [c async for c in chat]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == TEXT
        assert chunks[-1].usage is not None
        with pytest.raises(openai.NotFoundError, match="available models: chat, base"):
            await client.completions.create(model="nope", prompt="x")


async def test_stop_string_across_chunks_ends_the_engines_request(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        ids = ids_of("one two STOP three")
        for index, token_id in enumerate(ids):
            yield tokens(request, index, [token_id])
        await asyncio.Event().wait()

    stack.agent.script = script
    body = {"model": "base", "prompt": "x", "stop": ["STOP", "never"]}
    answer = (await stack.client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "one two "
    assert answer["choices"][0]["finish_reason"] == "stop"
    got = await stream(stack, "/v1/completions", **body)
    assert "".join(e["choices"][0]["text"] for e in got) == "one two "
    async with asyncio.timeout(5):
        while stack.agent.cancelled != {r.id for r in stack.agent.seen}:
            await asyncio.sleep(0.01)


async def test_models(stack: Stack) -> None:
    listed = (await stack.client.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["chat", "base"]
    one = (await stack.client.get("/v1/models/base")).json()
    assert (one["id"], one["max_model_len"]) == ("base", 256)
