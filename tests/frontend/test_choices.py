"""Several choices, echoes and log probabilities in OpenAI's shapes, whole and streamed; bodies as
common clients send them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from prism.frontend.api.openai.logprobs import CompletionLogprobs
from prism.frontend.requests import replies
from prism.frontend.text.tokenizers import ModelTokenizer, load_tokenizers
from prism.messages.requests import Chunk, Failure, Logprobs, Request
from tests.frontend.conftest import TOKENIZER, Stack, ids_of, make_spec
from tests.frontend.scripted_agent import Script, answering
from tests.frontend.test_completions import stream
from tests.frontend.tiny_model import make_model

TEXT = "größer"


def number_of(request: Request) -> int:
    """Returns the number of the request's choice."""
    return int(request.id.rsplit("-", 1)[1])


def probable(ids: list[int], value: float = -0.5) -> Script:
    """Returns a script that sends `ids` one by one with log probabilities of each and its
    neighbour."""

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        prompt = request.prompt_ids[1:]
        before = part(prompt, -2.0) if request.sampling.prompt_logprobs else None
        mine = value - number_of(request)
        for index, token_id in enumerate(ids):
            reason = "stop" if index + 1 == len(ids) else None
            of_token = part([token_id], mine) if request.sampling.logprobs is not None else None
            first = before if index == 0 else None
            yield Chunk(request.id, 1, index, [token_id], reason, 0, of_token, first)

    def part(ids: list[int], value: float) -> Logprobs:
        near = [[i, (i + 1) % 300] for i in ids]
        return Logprobs([value] * len(ids), near, [[value, value - 1]] * len(ids))

    return script


async def test_choices_of_one_prompt_have_seeds_of_their_own(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of("hi"), 0])
    body = {"model": "base", "prompt": ["a", "b"], "n": 3, "seed": 7}
    answer = (await stack.client.post("/v1/completions", json=body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, "hi") for i in range(6)]
    assert answer["usage"]["prompt_tokens"] == len(ids_of("a") + ids_of("b"))
    by_prompt = sorted((r.prompt_ids, r.sampling.seed) for r in stack.agent.seen)
    assert by_prompt == [(ids_of(p), seed) for p in "ab" for seed in (7, 8, 9)]
    chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "n": 2}
    got = await stream(stack, "/v1/chat/completions", **chat)
    for index in range(2):
        mine = [e["choices"][0] for e in got if e["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"]["content"] for c in mine) == "hi"
        assert mine[-1]["finish_reason"] == "stop"


async def test_the_best_are_the_likeliest(stack: Stack) -> None:
    said = {0: ("the fox", -2.0), 1: ("hi", -0.5), 2: ("dog", -1.0)}

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        text, value = said[number_of(request)]
        logprobs = Logprobs([value] * len(ids_of(text)))
        yield Chunk(request.id, 1, 0, ids_of(text), "stop", 0, logprobs)

    stack.agent.script = script
    body = {"model": "base", "prompt": "a", "n": 2, "best_of": 3, "return_token_ids": True}
    answer = (await stack.client.post("/v1/completions", json=body)).json()
    assert len(stack.agent.seen) == 3
    shown = [(c["index"], c["text"], c["token_ids"], c["logprobs"]) for c in answer["choices"]]
    assert shown == [(i, text, ids_of(text), None) for i, text in enumerate(("hi", "dog"))]
    usage = answer["usage"]
    assert usage["completion_tokens"] == sum(len(ids_of(text)) for text, _ in said.values())
    assert usage["prompt_tokens"] == len(ids_of("a"))


async def test_cached_tokens_are_those_before_the_first_choice(stack: Stack) -> None:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        cached = (2, 9)[number_of(request) > 0]
        yield Chunk(request.id, 1, 0, [5], "stop", cached)

    stack.agent.script = script
    body = {"model": "base", "prompt": [9] * 10, "n": 3}
    usage = (await stack.client.post("/v1/completions", json=body)).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (10, 2)


@pytest.mark.parametrize("inline", [True, False])
async def test_the_first_choice_computes_what_all_show_of_the_prompt(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """Holds even if another choice begins first.

    Many log probabilities are computed in a thread outside the event loop.
    """
    monkeypatch.setattr(replies, "_INLINE_TOKENS_MAX", 1 << 20 if inline else 8)
    part, threads = CompletionLogprobs.part, set[threading.Thread]()

    def noted(self: CompletionLogprobs, *told: Any) -> dict[str, Any]:
        threads.add(threading.current_thread())
        return part(self, *told)

    monkeypatch.setattr(CompletionLogprobs, "part", noted)
    prompt, others = ids_of("the fox"), asyncio.Event()

    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        first = number_of(request) == 0
        await (others.wait() if first else asyncio.sleep(0))
        async for item in probable([*ids_of("hi"), 0])(request):
            yield item
        others.set()

    stack.agent.script = script
    body = {"model": "base", "prompt": prompt, "echo": True, "logprobs": 2, "n": 2}
    whole = (await stack.client.post("/v1/completions", json=body)).json()["choices"]
    assert sorted(r.sampling.prompt_logprobs for r in stack.agent.seen) == [False, True]
    assert (threading.main_thread() in threads) is inline
    for choice in whole:
        shown = choice["logprobs"]["token_logprobs"]
        assert shown[: len(prompt)] == [None] + [-2.0] * (len(prompt) - 1)
    others.clear()
    got = [event["choices"][0] for event in await stream(stack, "/v1/completions", **body)]
    for choice in whole:
        mine = [each for each in got if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [v for each in mine for v in each["logprobs"][name]] == values


def test_a_tokens_text_is_looked_up_once(
    tools_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tools_tokenizer.token_bytes(7)
    monkeypatch.setattr(ModelTokenizer, "_decoded", None)
    assert tools_tokenizer.token_bytes(7) == wanted


async def test_an_echo_with_log_probabilities(stack: Stack) -> None:
    """Accepts the evaluation harness's form for log-likelihoods: token ids, one token, echo."""
    stack.agent.script = probable(ids_of(TEXT))
    prompt = ids_of("the fox €")
    body = {"model": "base", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 200}
    whole = (await stack.client.post("/v1/completions", json=body)).json()["choices"][0]
    assert whole["text"] == "the fox €" + TEXT
    shown = whole["logprobs"]
    all_ids = prompt + ids_of(TEXT)
    assert len(shown["tokens"]) == len(all_ids) == len(shown["text_offset"])
    assert shown["token_logprobs"] == [None] + [-2.0] * (len(prompt) - 1) + [-0.5] * len(
        ids_of(TEXT)
    )
    assert shown["top_logprobs"][0] is None
    assert shown["top_logprobs"][1][shown["tokens"][1]] == -2.0
    assert any(name.startswith("bytes:\\x") for name in shown["tokens"])
    for name, place in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert name.startswith("bytes:") or whole["text"].startswith(name, place)
    assert shown["text_offset"][len(prompt)] == len("the fox €")
    parts = [e["choices"][0] for e in await stream(stack, "/v1/completions", **body)]
    assert "".join(p["text"] for p in parts) == whole["text"]
    for name, values in shown.items():
        assert [v for p in parts for v in p["logprobs"][name]] == values


async def test_a_prompt_is_scored_without_an_output(stack: Stack) -> None:
    stack.agent.script = probable([*ids_of("y"), 0])
    ids = ids_of("the fox")
    body = {"model": "base", "prompt": ids, "logprobs": 1, "max_tokens": 0}
    refused = await stack.client.post("/v1/completions", json=body)
    assert refused.json()["error"]["message"] == "max_tokens: 0 requires echo: true"
    body["echo"] = True
    made = (await stack.client.post("/v1/completions", json=body)).json()
    [choice] = made["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the fox", "length")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-2.0] * (len(ids) - 1)
    assert made["usage"]["completion_tokens"] == 0
    assert made["usage"]["total_tokens"] == len(ids)
    parts = [e["choices"][0] for e in await stream(stack, "/v1/completions", **body)]
    assert "".join(part["text"] for part in parts) == "the fox"
    assert parts[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(("prompt", "text"), [("<|end|>hi", "<|end|>hi"), (None, "hi")])
async def test_offsets_beside_special_tokens(stack: Stack, prompt: str | None, text: str) -> None:
    """Shows special tokens in an echo if the client wrote them as text, not if it sent ids."""
    stack.agent.script = probable(ids_of("yes"))
    ids = ids_of("<|end|>hi")
    body = {"model": "base", "echo": True, "logprobs": 0, "prompt": prompt or ids}
    [choice] = (await stack.client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == text + "yes"
    shown = choice["logprobs"]
    assert shown["text_offset"][len(ids)] == len(text)
    assert shown["text_offset"][1] == text.index("hi")


async def test_a_chats_log_probabilities(stack: Stack) -> None:
    stack.agent.script = probable([*ids_of(TEXT), 0])
    messages: Any = [{"role": "user", "content": "x"}]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        asked: Any = {"model": "chat", "messages": messages, "logprobs": True, "top_logprobs": 2}
        answer = await client.chat.completions.create(**asked)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
        said = b"".join(bytes(c.bytes or []) for c in content[:-1])
        assert said.decode() == TEXT == answer.choices[0].message.content
        assert [len(c.top_logprobs) for c in content] == [2] * len(content)
        chunks = [c async for c in await client.chat.completions.create(stream=True, **asked)]
        parts = [c.choices[0].logprobs.content or [] for c in chunks if c.choices[0].logprobs]
        assert [c for part in parts for c in part] == content
    assert stack.agent.seen[0].sampling.logprobs == 2


EXTRAS: dict[str, Any] = {
    "min_p": 0, "repetition_penalty": 1.0, "skip_special_tokens": True, "prediction": None,
    "web_search_options": None, "min_tokens": 0, "logit_bias": {}, "tools": [], "stop": None,
    "max_completion_tokens": 3, "user": "me", "metadata": {"a": "b"}, "top_k": -1, "n": 1,
    "response_format": {"type": "text"}, "service_tier": "auto", "surprise": None,
}  # fmt: skip


async def test_extras_that_ask_for_nothing(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of("hi"), 0])
    extras = {key: value for key, value in EXTRAS.items() if key != "tools"}
    body = {"model": "base", "prompt": "x", **extras, "best_of": 1, "echo": False}
    response = await stack.client.post("/v1/completions", json={**body, "logprobs": None})
    assert response.status_code == 200, response.text
    chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], **EXTRAS}
    chat |= {"add_generation_prompt": True, "reasoning_effort": "low", "logprobs": False}
    chat |= {"tool_choice": "auto", "parallel_tool_calls": True, "functions": []}
    response = await stack.client.post("/v1/chat/completions", json=chat)
    assert response.status_code == 200, response.text
    assert {r.sampling.max_tokens for r in stack.agent.seen} == {3}


async def test_parameters_reach_the_engine(stack: Stack) -> None:
    stack.agent.script = answering([5])
    asked = {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {"7": -3}, "min_tokens": 2}
    body = {"model": "base", "prompt": "x", "skip_special_tokens": False, **asked}
    await stack.client.post("/v1/completions", json=body)
    sampling = stack.agent.seen[0].sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.logit_bias, sampling.min_tokens) == ({7: -3.0}, 2)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def tools_tokenizer(tmp_path: Path) -> ModelTokenizer:
    """Returns the tokenizer of a model whose template has tools and that has sampling defaults."""
    path = make_model(tmp_path / "tools")
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 7, "eos_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return load_tokenizers([make_spec("chat", path)])["chat"]


async def test_a_history_with_tools_and_an_answer_begun(
    stack: Stack, tools_tokenizer: ModelTokenizer
) -> None:
    stack.state.catalog.tokenizers["chat"] = tools_tokenizer
    stack.agent.script = answering([5])
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm "},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "It will "},
    ]
    body = {"model": "chat", "messages": messages, "continue_final_message": True}
    response = await stack.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    expected = "[user] hi[assistant] hm <weather Oslo>[tool] rain[assistant] It will "
    assert TOKENIZER.decode(stack.agent.seen[0].prompt_ids) == expected


async def test_sampling_defaults_are_the_models(
    stack: Stack, tools_tokenizer: ModelTokenizer
) -> None:
    stack.state.catalog.tokenizers["chat"] = tools_tokenizer
    stack.agent.script = answering([5])
    body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}
    for change in ({}, {"temperature": 0, "top_p": 1, "top_k": -1}):
        await stack.client.post("/v1/chat/completions", json={**body, **change})
    first, second = (r.sampling for r in stack.agent.seen)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.6, 0.95, 20, 0.0)
    assert (second.temperature, second.top_p, second.top_k) == (0, 1, -1)
