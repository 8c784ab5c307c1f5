"""Invalid input gets OpenAI's error format and a message that says what to change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prism.frontend.text.tokenizers import ModelTokenizer
from tests.frontend.conftest import Stack

GOOD: dict[str, Any] = {"model": "base", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}

COMPLETION_ERRORS = [
    ({"model": None}, "model", "model: Input should be a valid string"),
    ({"prompt": 7.5}, "prompt", "prompt: must be a string, a list of strings, a list of token"),
    ({"prompt": ["a", 1]}, "prompt", "prompt: must be a string, a list of strings"),
    ({"prompt": []}, "prompt", "prompt: has 0 prompts; give 1 to 128"),
    ({"prompt": ""}, "prompt", "prompt: is empty"),
    ({"prompt": [5, 300]}, "prompt", "token id 300 is outside the vocabulary of 300 tokens"),
    ({"prompt": [-1]}, "prompt", "prompt: must be a string, a list of strings"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 requires echo: true"),
    ({"max_tokens": "9"}, "max_tokens", "max_tokens: Input should be a valid integer"),
    ({"max_tokens": True}, "max_tokens", "max_tokens: Input should be a valid integer"),
    ({"temperature": 2.5}, "temperature", "temperature: Input should be less than or equal to 2"),
    ({"top_p": 0}, "top_p", "top_p: Input should be greater than 0"),
    ({"top_k": 0}, "top_k", "top_k: must be positive, or -1"),
    ({"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
    ({"stop": [""]}, "stop", "stop: must be a non-empty string or a list of them"),
    ({"stop": ["a"] * 17}, "stop", "stop: has 17 strings; at most 16"),
    ({"stream": "yes"}, "stream", "stream: Input should be a valid boolean"),
    ({"n": True}, "n", "n: Input should be a valid integer"),
    ({"n": 129}, "n", "n: Input should be less than or equal to 128"),
    ({"n": 3, "best_of": 2}, "best_of", "best_of: must be >= n (3)"),
    ({"best_of": 2, "stream": True}, "best_of", "best_of: cannot be streamed"),
    ({"echo": 1}, "echo", "echo: Input should be a valid boolean"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "logprobs: Input should be a valid integer"),
    ({"json_schema": 3}, "json_schema", "json_schema: Input should be a valid string"),
    ({"min_p": 1.1}, "min_p", "min_p: Input should be less than or equal to 1"),
    ({"min_pp": 0.1}, "min_pp", "min_pp: unknown field; remove it"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101 is not between -100 and 100"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "the is not a token id"),
    ({"logit_bias": {"0" * 5000 + "5": 1}}, "logit_bias", "is not a token id"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "300 is outside the vocabulary of 300 tokens"),
    ({"suffix": "x"}, "suffix", "suffix: 'x' is not supported; remove it"),
    ({"prompt": ["x"] * 128, "n": 128}, "n", "n: requests 16384 choices; at most"),
    ({"slo_ttft_ms": 0}, "slo_ttft_ms", "slo_ttft_ms: Input should be greater than 0"),
]


def check_shape(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("change", "param", "message"), COMPLETION_ERRORS)
async def test_bad_completion(
    stack: Stack, change: dict[str, Any], param: str, message: str
) -> None:
    response = await stack.client.post("/v1/completions", json={**GOOD, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    check_shape(error)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
CHAT_ERRORS = [
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role: Input should be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        'messages[0].content: part 0 must be {"type": "image_url"',
    ),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages: chat does not take images; remove them",
    ),
    (
        {"messages": [{"role": "system", "content": [IMAGE]}]},
        "messages[0]: only messages of the role user may have images",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "no tools here"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "differ; give one of them"),
    ({"model": "base"}, "base does not have a chat template; use /v1/completions"),
    ({"tools": [{"type": "function"}]}, "tools[0].function: Field required"),
    ({"top_logprobs": 2}, "top_logprobs: requires logprobs: true"),
    ({"tool_choice": "some"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    ({"tool_choice": {"function": {}}}, "tool_choice.function.name: Field required"),
    ({"tool_choice": "required"}, "tool_choice: requires tools"),
    ({"stream_options": {"usage": True}}, "stream_options.usage: Extra inputs"),
    (
        {"continue_final_message": True},
        "continue_final_message: the last message must have the role assistant",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHAT_ERRORS)
async def test_bad_chat(stack: Stack, change: dict[str, Any], message: str) -> None:
    response = await stack.client.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    check_shape(response.json()["error"])


GIVEN = ("messages", "tools", "add_generation_prompt", "eos_token", "raise_exception", "namespace")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_options_are_none_of_what_a_template_is_given(stack: Stack, path: str) -> None:
    for name in GIVEN:
        body = {**CHAT, "chat_template_kwargs": {"enable_thinking": True, name: []}}
        response = await stack.client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
        assert f"kwargs: {name} is set by the server; remove it" in error["message"]
    response = await stack.client.post(
        "/tokenize", json={**CHAT, "chat_template_kwargs": {"self": 1}}
    )
    assert response.status_code == 200, "a parameter of Jinja's own function"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": "base", "prompt": "x"']
)
async def test_malformed_json(stack: Stack, body: bytes) -> None:
    response = await stack.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    check_shape(response.json()["error"])


async def test_unknown_model(stack: Stack) -> None:
    for response in (
        await stack.client.post("/v1/completions", json={**GOOD, "model": "gpt-9"}),
        await stack.client.get("/v1/models/gpt-9"),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert error["message"] == "the model 'gpt-9' does not exist; available models: chat, base"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "excess"), [(200, 57, 1), (200, 100, 44), (256, None, 1)]
)
async def test_context_overflow(
    stack: Stack, prompt: int, max_tokens: int | None, excess: int
) -> None:
    body = {"model": "base", "prompt": [9] * prompt, "max_tokens": max_tokens}
    response = await stack.client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"exceed it by {excess}: shorten" in error["message"]
    assert not stack.agent.seen


HOPELESS = {
    "/v1/completions": {"model": "base", "prompt": "x" * 100_000},
    "/v1/chat/completions": {
        "model": "chat",
        "messages": [{"role": "user", "content": "x" * 50_000}] * 2,
    },
}


@pytest.mark.parametrize("path", HOPELESS)
async def test_a_text_that_no_tokens_could_fit_is_refused_untokenised(
    stack: Stack, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode(*_: object, **__: object) -> list[list[int]]:
        raise AssertionError("megabytes would be tokenised")

    monkeypatch.setattr(ModelTokenizer, "encode", encode)
    response = await stack.client.post(path, json=HOPELESS[path])
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    # 64 characters a token at most: 1,563 of them, and max_tokens 1, against 256
    assert "prompt's at least 1563 and max_tokens 1 exceed it by at least 1308" in error["message"]


async def test_a_long_text_is_tokenised_beside_the_event_loop(stack: Stack) -> None:
    """Heartbeats continue: without them for seconds, agents take the frontend for dead."""
    tokenizer = stack.state.catalog.tokenizers["base"]
    text = "hello " * 300_000
    encoding = asyncio.create_task(tokenizer.encode([text], special_tokens=False))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert len((await encoding)[0]) > 300_000
    assert turns > 10


async def test_a_body_without_end(stack: Stack) -> None:
    response = await stack.client.post("/v1/completions", content=b" " * (9 << 20))
    assert response.status_code == 413


async def test_unknown_routes_and_methods(stack: Stack) -> None:
    lost = await stack.client.get("/v2/completions")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
    method = await stack.client.get("/v1/completions")
    assert method.status_code == 405
    check_shape(method.json()["error"])


async def test_fields_that_ask_for_nothing_are_accepted(stack: Stack) -> None:
    from tests.frontend.scripted_agent import answering

    stack.agent.script = answering([7])
    neutral = {"n": 1, "logprobs": None, "echo": False, "user": "me", "logit_bias": {}}
    response = await stack.client.post("/v1/completions", json={**GOOD, **neutral})
    assert response.status_code == 200
