"""The Responses API with OpenAI's own client and types, and the fields that it rejects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from prism.frontend.api.responses.response_types import Item, messages_of
from prism.frontend.api.responses.responses import _Items
from prism.frontend.requests.answer_parsing import AnswerParsers
from prism.messages.requests import Chunk, Failure, Request
from tests.frontend.conftest import Stack, ids_of
from tests.frontend.scripted_agent import Script, answering, died, tokens
from tests.frontend.test_tools import CALLS, tools_stack  # noqa: F401 - a fixture

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TEXT = "größer als 1 €"
STARTED: Any = SimpleNamespace(spec=SimpleNamespace(id="resp_x", parsing=None))  # a generation


async def post(stack: Stack, **body: Any) -> httpx.Response:
    return await stack.client.post("/v1/responses", json={"model": "chat", "input": "x", **body})


async def whole(stack: Stack, **body: Any) -> Response:
    answer = await post(stack, **body)
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json(), strict=True)


async def streamed(stack: Stack, **body: Any) -> list[Any]:
    """Returns the events in OpenAI's types; checks the frames and numbers."""
    body = {"model": "chat", "input": "x", "stream": True, **body}
    async with stack.client.stream("POST", "/v1/responses", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = (await response.aread()).decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = EVENT.validate_python(json.loads(data.removeprefix("data: ")), strict=True)
        assert (name, event.sequence_number) == (f"event: {event.type}", number)
        events.append(event)
    return events


def kinds(events: list[Any]) -> list[str]:
    """Returns the events' types in order, each run of deltas as one."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if "delta" not in name or name != names[at - 1]]


MESSAGE = [
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
    "content_part.done", "output_item.done",
]  # fmt: skip
REASONING = [name.replace("output_text", "reasoning_text") for name in MESSAGE]
CALL = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
    "output_item.done",
]  # fmt: skip


async def test_a_text(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of(TEXT), 0], step=2)
    asked = {"instructions": "be brief", "temperature": 0.5, "metadata": {"a": "b"}}
    made = await whole(stack, **asked, max_output_tokens=100)
    assert (made.output_text, made.status, made.id[:5]) == (TEXT, "completed", "resp_")
    assert (made.temperature, made.top_p, made.max_output_tokens) == (0.5, 1.0, 100)
    assert (made.instructions, made.metadata, made.tools) == ("be brief", {"a": "b"}, [])
    prompt = ids_of("[system] be brief\n[user] x\n[assistant] ")
    request = stack.agent.seen[-1]
    assert (request.prompt_ids, request.sampling.max_tokens) == (prompt, 100)
    output = len(ids_of(TEXT)) + 1
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(prompt), output)
    assert made.usage.total_tokens == len(prompt) + output
    events = await streamed(stack, **asked, max_output_tokens=100)
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "completed"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert [event.response.status for event in events[:2]] == ["in_progress"] * 2
    assert events[0].response.output == []
    last = events[-1].response.model_dump()
    same = made.model_dump()
    for each in (last, same):
        assert each["output"][0].pop("id").startswith("msg_")
        del each["id"], each["created_at"]
    assert last == same


async def test_an_answer_that_is_cut_is_incomplete(stack: Stack) -> None:
    stack.agent.script = answering(ids_of(TEXT))
    made = await whole(stack, max_output_tokens=3)
    assert (made.status, made.output[0].status) == ("incomplete", "incomplete")
    assert made.incomplete_details.reason == "max_output_tokens"
    events = await streamed(stack, max_output_tokens=3)
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "incomplete"]
    assert events[-1].response.output_text == made.output_text
    assert made.output_text


async def test_an_empty_answer_is_an_empty_message(stack: Stack) -> None:
    stack.agent.script = answering([0])
    assert [(item.type, item.status) for item in (await whole(stack)).output] == [
        ("message", "completed")
    ]
    events = await streamed(stack)
    assert kinds(events)[2:-1] == [name for name in MESSAGE if "delta" not in name]


def failing() -> Script:
    async def script(request: Request) -> AsyncIterator[Chunk | Failure]:
        yield tokens(request, 0, ids_of("the quick"))
        yield died(request, retryable=False)

    return script


async def test_what_fails_says_so(stack: Stack) -> None:
    stack.agent.script = failing()
    answer = await post(stack)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
    events = await streamed(stack)
    failed = events[-1].response
    assert (events[-1].type, failed.status) == ("response.failed", "failed")
    assert (failed.error.code, failed.error.message) == (
        "server_error",
        "engine_died: the engine died",
    )
    assert (failed.output_text, failed.output[0].status) == ("the quick", "incomplete")
    counted = (await stack.client.get("/metrics")).text
    assert 'prism_requests_total{frontend="f0",model="chat",outcome="engine_died"} 2.0' in counted


async def test_a_repeat_is_the_same(stack: Stack) -> None:
    stack.agent.script = answering([*ids_of(TEXT), 0])
    body = {"model": "chat", "input": "x"}
    post = stack.client.post
    answers = [
        (await post("/v1/responses", json=body, headers={"Idempotency-Key": "k"})).json()
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert len(stack.agent.seen) == 1


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> list[Any]:
    """Accepts any grammar; returns the grammars that were checked."""
    stack: Stack = request.getfixturevalue(request.param)
    seen: list[Any] = []

    async def check(*asked: Any) -> None:
        seen.append(asked[2:])

    chat = stack.state.live.config.models[0]
    stack.state.specs.modules.grammars(chat).check = check
    return seen


THOUGHT = f"<think>Hm.</think>Let me see. {CALLS}"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_reasoning_text_and_calls(tools_stack: Stack, step: int) -> None:  # noqa: F811
    tools_stack.agent.script = answering([*ids_of(THOUGHT), 0], step=step)
    made = await whole(tools_stack, tools=[WEATHER])
    events = await streamed(tools_stack, tools=[WEATHER])
    items = [*REASONING, *MESSAGE, *CALL, *CALL]
    assert kinds(events) == ["created", "in_progress", *items, "completed"]
    for response in (made, events[-1].response):
        reasoning, message, *calls = response.output
        assert [part.text for part in reasoning.content] == ["Hm."]
        assert message.content[0].text.strip() == "Let me see."
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        assert {call.name for call in calls} == {"weather"}
        assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4
        assert {item.status for item in response.output} == {"completed"}
        assert response.usage.output_tokens_details.reasoning_tokens == len(ids_of("Hm."))
        assert response.tools[0].model_dump(exclude_none=True) == WEATHER
    for index, item in enumerate(events[-1].response.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert mine[0].item.id == item.id
        assert mine[-1].item == item


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
async def test_space_beside_calls_is_no_message(tools_stack: Stack) -> None:  # noqa: F811
    tools_stack.agent.script = answering([*ids_of(f"\n\n{CALLS}"), 0])
    for output in (
        (await whole(tools_stack, tools=[WEATHER])).output,
        (await streamed(tools_stack, tools=[WEATHER]))[-1].response.output,
    ):
        assert [item.type for item in output] == ["function_call"] * 2
    tools_stack.agent.script = answering([*ids_of("  x \n"), 0])
    for response in (await whole(tools_stack), (await streamed(tools_stack))[-1].response):
        assert response.output_text == "  x \n"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
async def test_a_text_that_is_cut_behind_calls_stays_there(
    tools_stack: Stack,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AnswerParsers, "_find", lambda *_: ("hermes", ""))
    ids = ids_of(f"{CALLS.rstrip()} That is all")
    tools_stack.agent.script = answering([*ids, 0])
    output = (await whole(tools_stack, tools=[WEATHER], max_output_tokens=len(ids))).output
    assert [item.type for item in output] == ["function_call", "function_call", "message"]
    assert [item.status for item in output] == ["completed", "completed", "incomplete"]
    assert [json.loads(call.arguments)["city"] for call in output[:2]] == ["Oslo", "Rome"]
    assert output[2].content[0].text.strip() == "That is all"


def test_a_calls_end_comes_before_the_text_of_the_same_delta() -> None:
    items = _Items(STARTED)
    call = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"function": {"arguments": '"Oslo"}'}}
    for said in ({"tool_calls": [call]}, {"content": " Yes", "tool_calls": [rest]}):
        list(items.take(said))
    list(items.close())
    called, message = items.parts
    assert json.loads(called["arguments"]) == {"city": "Oslo"}
    assert message["content"][0]["text"] == " Yes"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
async def test_the_sdk_streams_calls_and_sends_its_items_back(
    tools_stack: Stack,  # noqa: F811
) -> None:
    """Runs two turns of an unchanged client: its stream helper, and the output as next input."""
    said: Any = [{"role": "user", "content": "x"}]
    async with openai.AsyncOpenAI(base_url=f"{tools_stack.url}/v1", api_key="none") as client:
        tools_stack.agent.script = answering([*ids_of(THOUGHT), 0])
        async with client.responses.stream(model="chat", input=said, tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        assert [call.parsed_arguments for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
        snapshots = [
            e.snapshot for e in events if e.type == "response.function_call_arguments.delta"
        ]
        assert snapshots[-1] == calls[-1].arguments
        said += final.output
        said += [
            {"type": "function_call_output", "call_id": c.call_id, "output": "rain"} for c in calls
        ]
        seen = len(tools_stack.agent.seen)
        with pytest.raises(
            openai.BadRequestError, match="input: rejected by the model's chat template"
        ):
            await client.responses.create(model="chat", input=said, tools=[WEATHER])
        assert len(tools_stack.agent.seen) == seen
    # The tiny template refuses tools' messages; what it was given:
    items = [Item.model_validate(i.to_dict() if isinstance(i, BaseModel) else i) for i in said]
    user, answer, *outputs = messages_of(items)
    assert user == {"role": "user", "content": "x"}
    assert (answer["content"].strip(), answer["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [call["id"] for call in answer["tool_calls"]] == [c.call_id for c in calls]
    assert [(o["role"], o["tool_call_id"], o["content"]) for o in outputs] == [
        ("tool", call.call_id, "rain") for call in calls
    ]


class City(BaseModel):
    name: str


@pytest.mark.parametrize("compiled", ["stack"], indirect=True)
async def test_structured_output(stack: Stack, compiled: list[Any]) -> None:
    stack.agent.script = answering([*ids_of('{"name": "Oslo"}'), 0])
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        parsed = await client.responses.parse(model="chat", input="x", text_format=City)
        assert parsed.output_parsed == City(name="Oslo")
        grammar = stack.agent.seen[-1].sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.text)["properties"]["name"]["type"] == "string"
        assert parsed.text is not None
        assert parsed.text.format is not None
        assert parsed.text.format.type == "json_schema"
        await client.responses.create(
            model="chat", input="x", text={"format": {"type": "json_object"}}
        )
        grammar = stack.agent.seen[-1].sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.text) == {"type": "object"}
    bad = await post(stack, text={"format": {"type": "json_schema", "name": "x"}})
    assert bad.json()["error"]["message"].startswith("text.format: json_schema.schema must be")
    assert bad.json()["error"]["param"] == "text.format"


@pytest.mark.parametrize("compiled", ["tools_stack"], indirect=True)
async def test_a_call_that_must_be_made(
    tools_stack: Stack,  # noqa: F811
    compiled: list[Any],
) -> None:
    tools_stack.agent.script = answering([*ids_of(CALLS), 0])
    for choice in ("required", {"type": "function", "name": "weather"}):
        made = await whole(tools_stack, tools=[WEATHER], tool_choice=choice)
        assert compiled[-1][-1] == "tools"
        shown = made.tool_choice
        assert (shown.model_dump() if isinstance(shown, BaseModel) else shown) == choice
