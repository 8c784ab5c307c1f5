"""Large bodies do not block the event loop, whose heartbeat keeps all requests alive."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest

from prism.errors import BadRequestError, RequestError
from prism.frontend.api.openai.logprobs import CompletionLogprobs, chat_logprobs
from prism.frontend.protocol.bodies import parse_body
from prism.frontend.protocol.chat_types import MESSAGES_MAX, PARTS_MAX, ChatBody
from prism.frontend.protocol.openai_types import CompletionBody
from prism.frontend.requests import specs
from prism.frontend.text.chat_template import ChatTemplate
from prism.messages.requests import Logprobs
from tests.frontend.conftest import Stack
from tests.frontend.scripted_agent import answering

PATH = "/v1/chat/completions"
CALLED: dict[str, Any] = {"role": "assistant", "content": ""}
EMPTY = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}


def chat(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": messages, **more}


def called(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


TOO_LARGE = {
    "messages": (chat([EMPTY] * (MESSAGES_MAX + 1)), "has 4097 messages; at most 4096"),
    "parts": (
        chat([{"role": "user", "content": [PART] * (PARTS_MAX + 1)}]),
        "has 1025 parts; at most 1024 are allowed",
    ),
    "options": (
        chat([EMPTY], chat_template_kwargs={"documents": ["x" * 100] * 70_000}),
        "at most 1048576 are allowed",
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
async def test_too_large_a_conversation_is_refused_by_name(stack: Stack, what: str) -> None:
    body, message = TOO_LARGE[what]
    response = await stack.client.post(PATH, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == ("chat_template_kwargs" if what == "options" else "messages")
    assert message in error["message"]


async def test_hundred_thousands_of_empty_messages_are_never_parsed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejects four at once; each of them blocked the event loop for seconds."""

    def parse(*_: object) -> None:
        raise AssertionError("hundreds of thousands of objects would be made")

    monkeypatch.setattr(ChatBody, "model_validate_json", parse)
    body = json.dumps(chat([EMPTY] * 285_000), separators=(",", ":")).encode()
    flood = [asyncio.create_task(stack.client.post(PATH, content=body)) for _ in range(4)]
    stack.agent.script = answering([7])
    other = await stack.client.post("/v1/completions", json={"model": "base", "prompt": "x"})
    assert other.status_code == 200
    for answer in await asyncio.gather(*flood):
        assert answer.status_code == 400
        assert "more than 32768 objects and lists" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ["{[" * 40_000, '\\"{' * 40_000, "\\" + "[" * 40_000, "{" * 40_000 + '"']
)
def test_braces_in_a_text_are_no_objects(text: str) -> None:
    body = json.dumps({"model": "base", "prompt": text}).encode()
    assert parse_body(CompletionBody, body).prompt == [text]


def test_a_string_without_an_end_is_searched_once() -> None:
    """Takes minutes on this body if searched from each of its quotes."""
    body = b'{"model":"' + rb"\"" * 500_000 + b"[" * 33_000
    with pytest.raises(BadRequestError, match="EOF while parsing"):
        parse_body(CompletionBody, body)


@pytest.mark.parametrize(
    ("flood", "what"),
    [
        (b'"m": {' + b'"x":0,' * 65_537 + b'"y":0}', "65536 members of objects"),
        (b'"stop_token_ids": [' + b"1," * 1_114_113 + b"1]", "1114112 values"),
        (b'"stop": [' + b'"",' * 1_114_113 + b'""]', "1114112 values"),
    ],
)
def test_floods_of_values_are_never_parsed(
    flood: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejects them before the parser, which blocks the event loop for 0.5 s per 8 MB."""
    monkeypatch.setattr(CompletionBody, "model_validate_json", None)
    with pytest.raises(BadRequestError, match=f"the body has more than {what}; send fewer"):
        parse_body(CompletionBody, b'{"model": "base", "prompt": "x",' + flood + b"}")


def test_marks_in_a_text_are_no_values() -> None:
    text = '{"a": [1, 2], ' * 300_000
    assert parse_body(CompletionBody, json.dumps({"model": "base", "prompt": text}).encode())


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_a_structure_has_few_names(field: str) -> None:
    body = {"model": "base", "prompt": "x", field: {f"x{n}": None for n in range(65)}}
    with pytest.raises(BadRequestError, match=f"{field}: .*at most 64"):
        parse_body(CompletionBody, json.dumps(body).encode())


def test_the_bound_counts_objects_and_lists() -> None:
    lists: list[Any] = [[]] * (32 * 1024 - 2)  # with the body itself and the list of them
    for extra, message in (([], "x: unknown field"), ([[]], "more than 32768 objects")):
        body = json.dumps({"model": "base", "prompt": "{", "x": lists + extra})
        with pytest.raises(RequestError, match=message):
            parse_body(CompletionBody, body.encode())


@pytest.mark.parametrize(
    ("body", "beside"),
    [
        (chat([EMPTY]), False),
        (chat([EMPTY], chat_template_kwargs={"enable_thinking": False}), False),
        (chat([EMPTY] * 33), True),
        (chat([EMPTY], chat_template_kwargs={"documents": [{}]}), True),
        (chat([EMPTY], chat_template_kwargs={"text": "x" * 20_000}), True),
        (chat([{**CALLED, "reasoning_content": "x" * 20_000}]), True),
        (chat([{**CALLED, "tool_calls": [called("x" * 20_000)]}]), True),
        (chat([{**CALLED, "tool_calls": [called("{}")] * 9}], tools=[tool({})] * 8), False),
        (chat([EMPTY], tools=[tool({"enum": [1] * 20_000})]), True),
        (chat([EMPTY], tools=[tool({"x" * 20_000: 1})]), True),
        (chat([{"role": "user", "content": "x" * 16_384}, EMPTY]), False),
        (chat([{"role": "user", "content": "x" * 16_384}, {**EMPTY, "content": "x"}]), True),
    ],
)
async def test_a_large_conversation_is_rendered_beside_the_event_loop(
    stack: Stack, body: dict[str, Any], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def render(*_: Any) -> str:
        threads.append(threading.current_thread())
        return "x"

    monkeypatch.setattr(ChatTemplate, "render", render)
    stack.agent.script = answering([7])
    response = await stack.client.post(PATH, json={**body, "tool_choice": "none"})
    assert response.status_code == 200 or "context" in response.json()["error"]["message"]
    if threads:
        assert (threads[0] is not threading.main_thread()) is beside


@pytest.mark.parametrize(
    "options", [{"bos_token": 10**30}, {"raise_exception": 0}, {"messages": 1}]
)
async def test_no_template_option_is_a_bug_of_ours(stack: Stack, options: dict[str, Any]) -> None:
    stack.agent.script = answering([7])
    body = chat([{"role": "tool", "content": "x"}], chat_template_kwargs=options)
    assert (await stack.client.post(PATH, json=body)).status_code == 400


@pytest.mark.parametrize(("chars", "beside"), [(10, False), (20_000, True)])
async def test_the_grammar_of_large_tools_is_made_beside_the_event_loop(
    stack: Stack, chars: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of strict tools took 0.2 s."""
    threads: list[threading.Thread] = []

    def made(*_: Any, **__: Any) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr(specs, "tool_grammar", made)
    body = ChatBody.model_validate(
        chat([EMPTY], tools=[tool({"enum": ["x" * chars]})], tool_choice="required")
    )
    model = stack.state.live.config.models[0]
    assert await stack.state.specs._call_grammar(body, model, None) is None
    assert [thread is not threading.main_thread() for thread in threads] == [beside] * 2


async def test_prompts_are_echoed_beside_the_event_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def echoes(*_: Any) -> tuple[str, ...]:
        threads.append(threading.current_thread())
        return ("x",)

    monkeypatch.setattr(specs, "_echoes", echoes)
    body = CompletionBody(model="base", prompt=[[5, 6]], echo=True)
    assert (await stack.state.specs.completion(body)).echoes == ("x",)
    assert threads[0] is not threading.main_thread()


async def test_log_probabilities_are_made_into_text_token_by_token(stack: Stack) -> None:
    """Encodes each token separately: in one piece, 32,000 tokens with 20 each took 0.3 s."""
    tokenizer = stack.state.catalog.tokenizers["base"]
    top = Logprobs([-0.5] * 3, [[5, 6]] * 3, [[-0.5, -1e9]] * 3)
    chat = chat_logprobs(tokenizer, [5, 6, 5], top)["content"]
    completion = CompletionLogprobs(tokenizer, shows_special=True).part([5, 6, 5], top)
    for parts in (chat, completion["top_logprobs"]):
        assert [type(part) for part in parts] == [msgspec.Raw] * 3
    first, second = (tokenizer.token_bytes(each).decode() for each in (5, 6))
    assert msgspec.json.decode(chat[0])["top_logprobs"][1]["token"] == second
    told = msgspec.json.decode(msgspec.json.encode(completion))["top_logprobs"]
    assert told[0] == {first: -0.5, second: -9999.0}
