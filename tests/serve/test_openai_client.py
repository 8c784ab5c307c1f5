"""OpenAI's own client, sync and async, against a whole cluster of fake engines."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from tests.serve.conftest import Cluster

SAID: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "a", "messages": SAID, "max_tokens": 12, "temperature": 0}
ASKED: Any = {"model": "a", "input": SAID, "max_output_tokens": 12, "temperature": 0}


def test_responses_are_chat_completions(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(**CHAT).choices[0]
        answer = client.responses.create(**ASKED)
        assert answer.output_text == chat.message.content
        assert answer.output_text
        assert (answer.status == "incomplete") is (chat.finish_reason == "length")
        with client.responses.stream(**{**ASKED, "max_output_tokens": 200}) as stream:
            events: list[Any] = list(stream)
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == events[-1].response.output_text
        assert text.startswith(answer.output_text)


def test_many_at_a_time(cluster: Cluster) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:

            async def streamed(model: str) -> str:
                events = await client.responses.create(**{**ASKED, "model": model}, stream=True)
                texts = [e.delta async for e in events if e.type == "response.output_text.delta"]
                return "".join(texts)

            return await asyncio.gather(*(streamed(model) for model in "ab" * 8))

    texts = asyncio.run(ask())
    assert all(texts)
    assert set(texts[::2]) == {texts[0]}
    assert set(texts[1::2]) == {texts[1]}
