"""/tokenize and /detokenize apply the engine's input rules without an engine."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tokenizers.processors import TemplateProcessing

from prism.config.schema.access import ApiKey, hashed
from prism.frontend.api.openai import tokenize
from prism.frontend.protocol.openai_types import TOKENS_MAX
from prism.frontend.text.tokenizers import ModelTokenizer
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import TOKENIZER, Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering
from tests.frontend.tiny_model import EOS

TEXT = "the quick brown fox, größer als 1 €, 😀!"
SAID: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def stack(stack: Stack) -> AsyncIterator[Stack]:
    """Yields a cluster in which the tokenizer of `base` begins each text with a special token."""
    tokenizer = stack.state.catalog.tokenizers["base"].tokenizer
    tokenizer.post_processor = TemplateProcessing(f"{EOS} $A", special_tokens=[(EOS, 0)])
    yield stack
    assert not [request for request in stack.agent.seen if request.model == "base"]


async def post(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    answer = await stack.client.post(path, json={"model": "base", **body})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_a_text_and_back(stack: Stack) -> None:
    ids = [0, *ids_of(TEXT)]
    for prefix in ("", "/v1"):
        made = await post(stack, f"{prefix}/tokenize", prompt=TEXT)
        context = {"max_model_len": 256, "token_strs": None}
        assert made == {"tokens": ids, "count": len(ids), **context}
        back = await post(stack, f"{prefix}/detokenize", tokens=made["tokens"])
        assert back == {"prompt": EOS + TEXT}
    made = await post(
        stack, "/tokenize", prompt=TEXT, add_special_tokens=False, return_token_strs=True
    )
    assert made["tokens"] == ids[1:]
    assert made["token_strs"] == TOKENIZER.encode(TEXT).tokens
    assert (await post(stack, "/tokenize", prompt=""))["tokens"] == [0]
    assert await post(stack, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_a_conversation_has_the_tokens_that_its_completion_has(stack: Stack) -> None:
    stack.agent.script = answering([5])
    begun = [*SAID, {"role": "assistant", "content": "I"}]
    tool = {"type": "function", "function": {"name": "f"}}
    for asked in (
        {"messages": SAID},
        {"messages": SAID, "add_generation_prompt": False},
        {"messages": begun, "continue_final_message": True},
        {"messages": SAID, "tools": [tool], "tool_choice": "none", "chat_template_kwargs": {}},
    ):
        body = {"model": "chat", **asked}
        await stack.client.post("/v1/chat/completions", json=body)
        made = await post(stack, "/tokenize", **body)
        assert made["tokens"] == stack.agent.seen[-1].prompt_ids
        special = await post(stack, "/tokenize", **body, add_special_tokens=True)
        assert special["tokens"] == [0, *made["tokens"]]


async def test_the_openai_client(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        body = {"model": "base", "prompt": "hello"}
        made: Any = await client.post("/tokenize", cast_to=object, body=body)
        assert made["count"] == 1 + len(ids_of("hello"))
        with pytest.raises(openai.NotFoundError, match="available models: chat, base"):
            await client.post("/detokenize", cast_to=object, body={"model": "no", "tokens": []})


async def test_more_than_the_context_is_counted(stack: Stack) -> None:
    """Counts texts beyond the context, because clients ask by how much they exceed it."""
    assert (await post(stack, "/tokenize", prompt="x" * 300))["count"] == 301
    assert (await post(stack, "/detokenize", tokens=[9] * 300))["prompt"]


ERRORS = [
    ("/tokenize", {}, "prompt", "prompt: give either prompt or messages"),
    ("/tokenize", {"prompt": "", "messages": SAID}, "prompt", "give either prompt or messages"),
    ("/tokenize", {"prompt": ["a"]}, "prompt", "prompt: Input should be a valid string"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools", "tools: requires messages"),
    ("/tokenize", {"messages": []}, "messages", "messages: List should have at least 1 item"),
    ("/tokenize", {"messages": SAID}, "model", "base does not have a chat template"),
    ("/tokenize", {"prompt": "a", "max_tokens": 1}, "max_tokens", "max_tokens: unknown field"),
    (
        "/tokenize",
        {"model": "chat", "messages": [{"role": "tool", "content": "x"}]},
        "messages",
        "no tools here",
    ),
    ("/detokenize", {}, "tokens", "tokens: Field required"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "tokens[0]: Input should be greater than or"),
    ("/detokenize", {"tokens": ["a"]}, "tokens", "tokens[0]: Input should be a valid integer"),
    ("/detokenize", {"tokens": [5, 300]}, "tokens", "token id 300 is outside the vocabulary"),
    (
        "/detokenize",
        {"tokens": [7] * (TOKENS_MAX + 1)},
        "tokens",
        "tokens: List should have at most 1048576 items",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), ERRORS)
async def test_what_is_wrong_is_named(
    stack: Stack, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = await stack.client.post(path, json={"model": "base", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


async def test_a_text_that_never_fits_is_not_tokenised(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode(*_: object, **__: object) -> list[list[int]]:
        raise AssertionError("megabytes would be tokenised")

    monkeypatch.setattr(ModelTokenizer, "encode", encode)
    long = "x" * 100_000
    said = [{"role": "user", "content": long}]
    for body in ({"model": "base", "prompt": long}, {"model": "chat", "messages": said}):
        answer = await stack.client.post("/tokenize", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].endswith(
            "prompt's at least 1563 exceed it by at least 1307: shorten the prompt"
        )
        assert error["param"] in body


@pytest.mark.parametrize(("tokens", "beside"), [(4000, False), (5000, True)])
async def test_many_tokens_are_handled_beside_the_event_loop(
    stack: Stack, tokens: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def note(*_: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    monkeypatch.setattr(tokenize, "_tokenized", note)
    monkeypatch.setattr(tokenize, "_detokenized", note)
    await post(stack, "/tokenize", prompt="x" * tokens)
    await post(stack, "/detokenize", tokens=[7] * tokens)
    assert [thread is not threading.main_thread() for thread in threads] == [beside] * 2


async def test_a_frontend_that_ends_refuses(stack: Stack) -> None:
    stack.state.in_flight.draining = True
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        answer = await stack.client.post(path, json={"model": "base", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert not stack.state.in_flight.busy


async def test_keys_have_their_models(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    key = "key-of-one-1234567890"
    keys = [ApiKey("one", hashed(key), models=["base"], requests_per_minute=1)]
    async with stack_of(msgspec.structs.replace(config, keys=keys)) as guarded:
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"):
            fields: dict[str, Any] = {"tokens": [7]} if "detok" in path else {"prompt": "a"}
            for model, status in (("base", 200), ("chat", 404)):
                body = {"model": model, **fields}
                answer = await guarded.client.post(path, json=body, headers=headers)
                assert answer.status_code == status, answer.text
            refused = await guarded.client.post(path, json={"model": "base", **fields})
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/tokenizer", "/tokenize/x", "/status"):
            assert (await guarded.client.get(path, headers=headers)).status_code == 403
