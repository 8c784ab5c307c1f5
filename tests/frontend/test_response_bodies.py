"""Bodies of the Responses API: the prompts that they make, and the fields that it rejects."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from openai.types.responses import Response

from prism.frontend.api.responses.response_types import ResponsesBody
from tests.frontend.conftest import Stack, ids_of
from tests.frontend.scripted_agent import answering
from tests.frontend.test_responses import WEATHER, post, whole


async def test_the_conversation_that_the_template_sees(stack: Stack) -> None:
    stack.agent.script = answering([0])
    parts = [{"type": "input_text", "text": t} for t in ("who", "are you?")]
    answer = {"type": "output_text", "text": "me", "annotations": [], "logprobs": []}
    said = [
        {"role": "developer", "content": "in verse"},
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [answer]},
        {"role": "system", "content": "now"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    await whole(stack, input=said)
    plain = "[user] who\nare you?\n[assistant] me\n[system] now\n[user] and?\n[assistant] "
    assert stack.agent.seen[-1].prompt_ids == ids_of(f"[system] in verse\n{plain}")
    await whole(stack, input=said, instructions="be brief")
    joined = f"[system] be brief\n\nin verse\n{plain}"
    assert stack.agent.seen[-1].prompt_ids == ids_of(joined)


async def test_fields_of_chat_completions_are_extensions(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of("one STOP"), 0])
    asked = {"seed": 3, "top_k": 5, "stop": "STOP", "slo_ttft_ms": 150, "user": "me"}
    neutral = {"store": False, "background": False, "truncation": "disabled", "text": None}
    included = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    answer = await post(stack, **asked, **neutral, **included, previous_response_id=None)
    made = Response.model_validate(answer.json())
    sampling = stack.agent.seen[-1].sampling
    assert (sampling.seed, sampling.top_k, made.output_text) == (3, 5, "one ")
    assert stack.agent.seen[-1].slo_ttft_s == 0.15
    assert answer.json()["usage"]["slo"]["ttft"]["target_s"] == 0.15
    assert (answer.json()["store"], made.background) == (False, False)


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
ERRORS = [
    ({"input": []}, "input", "input: List should have at least 1 item"),
    ({"input": None}, "input", "input: Input should be a valid array"),
    ({"input": [{"role": "user"}]}, "input", "input[0]: a message requires content"),
    ({"input": [{"content": "x"}]}, "input", "input[0]: a message requires role"),
    (
        {"input": [{"role": "user", "content": "x", "call_id": "c"}]},
        "input",
        "input[0]: 'call_id' is not a field of a message; remove it",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "input",
        "input[0]: an input_image requires image_url; files are not stored",
    ),
    (
        {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [IMAGE]}]},
        "input",
        "input[1]: only messages of the role user may have images",
    ),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role: Input should be"),
    (
        {"input": [{"type": "web_search_call", "id": "w"}]},
        "input",
        "input[0].type: Input should be 'message', 'function_call'",
    ),
    ({"input": [{"type": {}}]}, "input", "input[0].type: Input should be 'message'"),
    (
        {"input": [{"type": "item_reference", "id": "m"}]},
        "input",
        "since items are not stored; send",
    ),
    (
        {"input": [CALLED, {"type": "function_call_output", "call_id": "d", "output": "x"}]},
        "input",
        "input[1].call_id: no earlier function_call has this id",
    ),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "has 4097 items; at most 4096"),
    (
        {"input": [{"role": "user", "content": "x"}] * 4096, "instructions": "be brief"},
        "input",
        "input: has 4097 messages; at most 4096",
    ),
    ({"store": True}, "store", "store: responses are not stored"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "conv_1"}, "conversation", "conversation: responses are not stored"),
    ({"background": True}, "background", "background: True is not supported"),
    ({"truncation": "auto"}, "truncation", "truncation: 'auto' is not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type: Input should be 'function'"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice: requires tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name: Field required"),
    ({"tools": [WEATHER]}, "tools", "tools: chat does not have a tool_parser"),
    ({"include": ["message.output_text.logprobs"]}, "include", "is not supported; remove it"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"max_output_tokens": 300}, "input", "max_output_tokens 300 exceed it by 64"),
    ({"input": "x" * 100_000}, "input", "shorten the prompt or lower max_output_tokens"),
    ({"max_tokens": 3}, "max_tokens", "max_tokens: unknown field; remove it"),
    ({"messages": []}, "messages", "messages: unknown field"),
    ({"top_k": 0}, "top_k", "top_k: must be positive, or -1"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "metadata.a: String should have at most 512"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary: Input should be"),
    ({"model": "base"}, "model", "base does not have a chat template"),
]


@pytest.mark.parametrize(("change", "param", "message"), ERRORS)
async def test_what_is_wrong_is_named(
    stack: Stack, change: dict[str, Any], param: str, message: str
) -> None:
    answer = await post(stack, **change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert not stack.agent.seen


async def test_a_large_body_is_translated_beside_the_event_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    translate = ResponsesBody.chat_fields

    def chat_fields(body: Any) -> Any:
        threads.append(threading.current_thread())
        return translate(body)

    monkeypatch.setattr(ResponsesBody, "chat_fields", chat_fields)
    stack.agent.script = answering([0])
    assert (await post(stack)).status_code == 200
    await post(stack, instructions="x" * 100_000)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
