"""The Messages API with Anthropic's own client and types, and the fields that it rejects."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from prism.config.schema.access import ApiKey, hashed
from prism.errors import BadRequestError
from prism.frontend.api.anthropic.message_types import CountBody
from prism.frontend.api.anthropic.messages import _arguments, _Blocks
from prism.frontend.requests.answer_parsing import AnswerParsers
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering
from tests.frontend.test_responses import STARTED, City, compiled, failing  # noqa: F401 - a fixture
from tests.frontend.test_tools import CALLS, tools_stack  # noqa: F401 - a fixture

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER: Any = {"role": "user", "content": "x"}
ASKED: Any = {"model": "chat", "max_tokens": 200, "messages": [USER]}
WEATHER: Any = {
    "name": "weather",
    "description": "the weather of now",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
TEXT = "größer als 1 €"
THOUGHT = f"<think>Hm.</think>Let me see. {CALLS}"


async def post(stack: Stack, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return await stack.client.post(path, json={**ASKED, **body})


async def whole(stack: Stack, **body: Any) -> Message:
    answer = await post(stack, **body)
    assert answer.status_code == 200, answer.text
    return Message.model_validate(answer.json())


async def streamed(stack: Stack, **body: Any) -> list[Any]:
    """Returns the events in Anthropic's types; checks the frames and the numbers of blocks."""
    async with stack.client.stream(
        "POST", "/v1/messages", json={**ASKED, "stream": True, **body}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = (await response.aread()).decode().split("\n\n")
    assert frames.pop() == ""
    events, at = [], -1
    for frame in frames:
        name, data = frame.split("\n")
        event = EVENT.validate_python(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {event.type}"
        at += event.type == "content_block_start"
        assert getattr(event, "index", at) == at
        events.append(event)
    return events


async def final_message(stack: Stack, **body: Any) -> Message:
    """Returns the SDK's message of a stream. The SDK no longer has sampling parameters."""
    extra = {name: body.pop(name) for name in ("temperature", "top_k") if name in body}
    async with (
        anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0) as client,
        client.messages.stream(**{**ASKED, **body}, extra_body=extra) as stream,
    ):
        return await stream.get_final_message()


def same(one: Message, other: Message) -> None:
    assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


async def test_a_text(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of(TEXT), 0], step=2)
    asked = {"system": [{"type": "text", "text": "be brief"}], "temperature": 0.5, "top_k": 5}
    made = await whole(stack, **asked, max_tokens=100, metadata={"user_id": "u"}, seed=4)
    assert (made.content[0].text, made.stop_reason, made.id[:4]) == (TEXT, "end_turn", "msg_")
    prompt = ids_of("[system] be brief\n[user] x\n[assistant] ")
    request = stack.agent.seen[-1]
    assert (request.prompt_ids, request.sampling.max_tokens) == (prompt, 100)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 5, 4)
    usage = (made.usage.input_tokens, made.usage.output_tokens)
    assert usage == (len(prompt), len(ids_of(TEXT)) + 1)
    events = await streamed(stack, **asked)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == TEXT
    assert events[-2].usage.output_tokens == made.usage.output_tokens
    same(await final_message(stack, **asked), made)


@pytest.mark.parametrize(
    ("body", "reason", "stop"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nowhere", "als"]}, "stop_sequence", "als"),
    ],
)
async def test_why_it_ended(stack: Stack, body: Any, reason: str, stop: str | None) -> None:
    stack.agent.script = answering([*ids_of(TEXT), 0])
    made = await whole(stack, **body)
    assert (made.stop_reason, made.stop_sequence) == (reason, stop)
    same(await final_message(stack, **body), made)


async def test_an_empty_answer_is_an_empty_text(stack: Stack) -> None:
    stack.agent.script = answering([0])
    made = await whole(stack)
    assert [block.model_dump(exclude_none=True) for block in made.content] == [
        {"type": "text", "text": ""}
    ]
    same(await final_message(stack), made)


async def test_what_fails_says_so_in_anthropics_words(stack: Stack) -> None:
    stack.agent.script = failing()
    answer = await post(stack)
    assert answer.status_code == 503
    error = {"type": "overloaded_error", "message": "engine_died: the engine died"}
    assert answer.json() == {"type": "error", "error": error}
    with pytest.raises(anthropic.APIStatusError, match="engine_died"):
        await final_message(stack)
    async with stack.client.stream(
        "POST", "/v1/messages", json=ASKED | {"stream": True}
    ) as response:
        frames = (await response.aread()).decode().split("\n\n")
    assert frames[-2] == f"event: error\ndata: {json.dumps(answer.json(), separators=(',', ':'))}"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_thinking_text_and_calls(tools_stack: Stack, step: int) -> None:  # noqa: F811
    tools_stack.agent.script = answering([*ids_of(THOUGHT), 0], step=step)
    made = await whole(tools_stack, tools=[WEATHER])
    thinking, text, *calls = made.content
    assert (thinking.thinking, text.text.strip()) == ("Hm.", "Let me see.")
    assert [(call.name, call.input) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]
    assert (made.stop_reason, len({call.id for call in calls})) == ("tool_use", 2)
    again = await final_message(tools_stack, tools=[WEATHER])
    for message in (made, again):  # ids of calls differ between requests
        message.content[1].text = message.content[1].text.strip()
        for call in message.content[2:]:
            call.id = ""
    same(again, made)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
async def test_a_text_that_is_cut_behind_calls_stays_there(
    tools_stack: Stack,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AnswerParsers, "_find", lambda *_: ("hermes", ""))
    ids = ids_of(f"{CALLS.rstrip()} That is all")
    tools_stack.agent.script = answering([*ids, 0])
    made = await whole(tools_stack, tools=[WEATHER], max_tokens=len(ids))
    assert [block.type for block in made.content] == ["tool_use", "tool_use", "text"]


def test_a_calls_end_comes_before_the_text_of_the_same_delta() -> None:
    blocks = _Blocks(STARTED)
    call = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"function": {"arguments": '"Oslo"}'}}
    for said in ({"tool_calls": [call]}, {"content": " Yes", "tool_calls": [rest]}):
        list(blocks.take(said))
    list(blocks.close())
    assert [(b.get("input"), b.get("text")) for b in blocks.parts] == [
        ({"city": "Oslo"}, None),
        (None, " Yes"),
    ]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
async def test_a_call_that_is_cut(tools_stack: Stack) -> None:  # noqa: F811
    limit = len(ids_of(CALLS[: CALLS.index("Oslo") + 2]))
    tools_stack.agent.script = answering(ids_of(CALLS))
    for made in (
        await final_message(tools_stack, tools=[WEATHER], max_tokens=limit),
        await whole(tools_stack, tools=[WEATHER], max_tokens=limit),
    ):
        assert made.stop_reason == "max_tokens"
    assert _arguments('{"city": "Os') == {"city": "Os"}
    assert _arguments("[1]") == _arguments("nothing") == {}


def chat_of(**body: Any) -> dict[str, Any]:
    """Returns the chat completion that a body asks for."""
    made = CountBody.model_validate({"model": "chat", "messages": [USER], **body})
    made.prepare()
    return made.chat.model_dump(exclude_unset=True, exclude_none=True)


TURNS: list[Any] = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "and then?"},
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "text", "text": "rain"}],
                "is_error": False,
            },
        ],
    },
]


def test_a_conversation_with_tools() -> None:
    made = chat_of(messages=TURNS, tools=[WEATHER], system="be brief")
    arguments = json.dumps({"city": "Oslo"})
    call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}, "type": "function"}
    answer = {"content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]}
    assert made["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "x"},
        {"role": "assistant", **answer},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "and then?"},
    ]
    [tool] = made["tools"]
    assert tool["function"]["parameters"] == WEATHER["input_schema"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"messages": [USER, {"role": "assistant", "content": "I"}]},
            {"continue_final_message": True},
        ),
    ],
)
def test_what_a_body_asks_for(body: Any, expected: Any) -> None:
    made = chat_of(tools=[WEATHER], **body)
    assert {name: made.get(name) for name in expected} == expected


@pytest.mark.parametrize("compiled", ["stack"], indirect=True)
async def test_structured_output(stack: Stack, compiled: list[Any]) -> None:  # noqa: F811
    """Accepts the format that Anthropic's client sends."""
    stack.agent.script = answering([*ids_of('{"name": "Oslo"}'), 0])
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none") as client:
        made = await client.messages.parse(**ASKED, output_format=City)
    assert made.parsed_output == City(name="Oslo")
    [[grammar, field]] = compiled
    assert (json.loads(grammar.text)["required"], field) == (["name"], "response_format")
    config = {"effort": "low", "format": {"type": "xml"}}
    answer = await post(stack, output_config=config)
    assert "output_config.format.type" in answer.json()["error"]["message"]


async def test_an_answer_that_has_begun_goes_on(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of(" am"), 0])
    made = await whole(stack, messages=[USER, {"role": "assistant", "content": "I"}])
    assert made.content[0].text == " am"
    assert stack.agent.seen[-1].prompt_ids == ids_of("[user] x\n[assistant] I")


async def test_tokens_are_counted(stack: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none") as client:
        counted = await client.messages.count_tokens(
            model="chat", messages=[USER], system="be brief"
        )
    assert counted.input_tokens == len(ids_of("[system] be brief\n[user] x\n[assistant] "))


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages: chat does not take images"),
    (
        {"messages": [USER, {"role": "assistant", "content": [IMAGE]}]},
        "messages[1]: only messages of the role user may have images",
    ),
    (
        {"messages": [{"role": "user", "content": [{**IMAGE, "source": None}]}]},
        "messages[0].content[0]: a block of the type image requires source",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tool type 'web_search_20250305' is not supported",
    ),
    ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "name is required for"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
    ({"messages": TURNS[2:]}, "tool_use 'c1' does not precede it"),
    ({"messages": TURNS[:2], "tools": [WEATHER]}, "the last tool_use requires a tool_result"),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": "x"},
        "chat_template_kwargs: Input should be a valid dictionary",
    ),
    ({"max_tokens": None}, "max_tokens"),
    ({"mcp_servers": []}, "mcp_servers: unknown field"),
    ({"response_format": {"type": "json_object"}}, "response_format: unknown field"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format: the fake engine does not support grammars",
    ),
    ({"model": "nobody"}, "model_not_found"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
async def test_what_is_refused(stack: Stack, body: Any, message: str) -> None:
    answer = await post(stack, **body)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert message in error["message"]
    assert stack.agent.seen == []


def test_a_source_of_a_text_is_no_image() -> None:
    text = {**IMAGE, "type": "text", "text": "x"}
    chat = chat_of(messages=[{"role": "user", "content": [text]}])
    assert chat["messages"] == [{"role": "user", "content": "x"}]


def test_a_count_refuses_what_a_message_does() -> None:
    with pytest.raises(BadRequestError, match="requires tools"):
        chat_of(tool_choice={"type": "any"})


async def test_keys_come_as_anthropics_client_sends_them(
    redis_server: BundledRedis, namespace: str, short_dir: Any
) -> None:
    config = make_config(redis_server.url, namespace, short_dir)
    config.keys.append(ApiKey("k", hashed("secret")))
    async with stack_of(config) as stack:
        stack.agent.script = answering([*ids_of("yes"), 0])
        for key in ("secret", "wrong"):
            async with anthropic.AsyncAnthropic(base_url=stack.url, api_key=key) as client:
                if key == "secret":
                    assert (await client.messages.create(**ASKED)).content[0].text == "yes"
                else:
                    with pytest.raises(anthropic.AuthenticationError, match="invalid_api_key"):
                        await client.messages.create(**ASKED)
