"""Tool calls and reasoning, separated by SGLang's parsers, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from prism.frontend.http.error_bodies import bad_request
from prism.frontend.requests.grammars import CHARS_MAX
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SAID: Any = [{"role": "user", "content": "x"}]
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Oslo", "Rome")
)


pytestmark = pytest.mark.usefixtures("parser_modules")


@pytest.fixture
async def tools_stack(
    redis_server: BundledRedis, namespace: str, short_dir: Path, parser_modules: None
) -> AsyncIterator[Stack]:
    config = make_config(redis_server.url, namespace, short_dir)
    chat, base = config.models
    chat = msgspec.structs.replace(
        chat, adapter="sglang", tool_parser="qwen25", reasoning_parser="qwen3"
    )
    config = msgspec.structs.replace(config, models=[chat, base])
    async with stack_of(config) as made:
        yield made


async def ask(
    stack: Stack, text: str, step: int = 1, end: str = "stop", **body: Any
) -> tuple[Any, list[Any]]:
    """Returns the whole answer, and the chunks of a streamed one."""
    stack.agent.script = answering([*ids_of(text), *([0] if end == "stop" else [])], end, step)
    asked: Any = {"model": "chat", "messages": SAID, **body}
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**asked)
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
    return whole.choices[0], [c.choices[0] for c in chunks]


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_calls_beside_text_and_reasoning(tools_stack: Stack, step: int) -> None:
    text = f"<think>Hm.</think>Let me see. {CALLS}"
    whole, chunks = await ask(tools_stack, text, step, tools=[WEATHER])
    message = whole.message
    assert (message.content.strip(), message.reasoning_content) == ("Let me see.", "Hm.")
    assert [c.function.name for c in message.tool_calls] == ["weather", "weather"]
    cities = [json.loads(c.function.arguments)["city"] for c in message.tool_calls]
    assert cities == ["Oslo", "Rome"]
    assert whole.finish_reason == "tool_calls" == chunks[-1].finish_reason
    assert len({c.id for c in message.tool_calls}) == 2
    content = "".join(c.delta.content or "" for c in chunks)
    reasoning = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in chunks)
    assert (content.strip(), reasoning) == ("Let me see.", "Hm.")
    told = [[d.index for d in c.delta.tool_calls or []] for c in chunks]
    assert all(sorted({*indices}) == indices for indices in told), "a call once in an event"
    streamed: dict[int, str] = {}
    for delta in (d for c in chunks for d in c.delta.tool_calls or []):
        streamed[delta.index] = streamed.get(delta.index, "") + (delta.function.arguments or "")
    assert [json.loads(a)["city"] for a in streamed.values()] == cities


async def test_a_call_that_is_cut_off_is_the_same_whole_and_streamed(tools_stack: Stack) -> None:
    """Ignores the last few characters, which parsers hold back."""
    text = f"<think>Hm.</think>So: {CALLS}"
    for end in range(len("<think>Hm.</think>"), len(text), 7):
        whole, chunks = await ask(tools_stack, text[:end], 3, "length", tools=[WEATHER])
        assert whole.finish_reason == "length" == chunks[-1].finish_reason
        assert (whole.message.content or "") == "".join(c.delta.content or "" for c in chunks)
        streamed: dict[int, tuple[str, str]] = {}
        for delta in (d for c in chunks for d in c.delta.tool_calls or []):
            name, arguments = streamed.get(delta.index, ("", ""))
            more = delta.function
            streamed[delta.index] = name + (more.name or ""), arguments + (more.arguments or "")
        calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
        assert [name for name, _ in calls] == [name for name, _ in streamed.values()]
        for (_, mine), (_, theirs) in zip(calls, streamed.values(), strict=True):
            shared = min(len(mine), len(theirs))
            assert mine[:shared] == theirs[:shared]
            assert abs(len(mine) - len(theirs)) <= 8
    assert calls[0] == ("weather", '{"city": "Oslo"}')


async def test_a_repeat_has_the_same_calls(tools_stack: Stack) -> None:
    tools_stack.agent.script = answering([*ids_of(CALLS), 0])
    body = {"model": "chat", "messages": SAID, "tools": [WEATHER], "n": 2}
    headers = {"Idempotency-Key": "k"}
    post = tools_stack.client.post
    answers = [
        (await post("/v1/chat/completions", json=body, headers=headers)).json() for _ in range(2)
    ]
    assert answers[0] == answers[1]
    messages = [choice["message"] for choice in answers[0]["choices"]]
    assert len({call["id"] for message in messages for call in message["tool_calls"]}) == 4


async def test_without_calls_the_answer_is_text(tools_stack: Stack) -> None:
    whole, chunks = await ask(tools_stack, "No.", tools=[WEATHER])
    assert (whole.message.content, whole.message.tool_calls) == ("No.", None)
    assert whole.finish_reason == "stop" == chunks[-1].finish_reason
    whole, chunks = await ask(tools_stack, "a <tool", tools=[WEATHER])
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content == "a <tool"
    whole, _ = await ask(tools_stack, "<think>Hm.</think>Yes.", tool_choice="none", tools=[WEATHER])
    assert (whole.message.content, whole.message.reasoning_content) == ("Yes.", "Hm.")


async def test_a_call_that_must_be_made_has_a_grammar(tools_stack: Stack) -> None:
    """Restricts output to the chosen tools in the parser's form; is checked as other grammars
    are."""
    other = {"type": "function", "function": {"name": "other"}}
    tried: list[str] = []

    async def check(*asked: Any) -> None:
        tried.append(asked[-1])

    chat = tools_stack.state.live.config.models[0]
    tools_stack.state.specs.modules.grammars(chat).check = check
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", ["weather", "other"]), (named, ["weather"])):
        await ask(tools_stack, CALLS, tools=[WEATHER, other], tool_choice=choice)
        grammar = tools_stack.agent.seen[-1].sampling.grammar
        assert grammar is not None
        assert grammar.kind == "structural_tag"
        form = json.loads(grammar.text)["format"]
        assert form["at_least_one"]
        assert form["stop_after_first"] is (choice is named)
        begins = [tag["begin"] for tag in form["tags"]]
        assert begins == [f'<tool_call>\n{{"name":"{n}", "arguments":' for n in names]
        schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
        parameters = WEATHER["function"]["parameters"]
        assert schemas == [parameters, {"type": "object"}][: len(names)]
        assert all(tag["content"]["max_whitespace_cnt"] for tag in form["tags"])
    assert set(tried) == {"tools"}


async def test_a_schema_that_cannot_be_compiled_leaves_a_call_to_be_any_object(
    tools_stack: Stack,
) -> None:
    async def check(*asked: Any) -> None:
        if "city" in asked[2].text:
            raise bad_request("tools: cannot be compiled", "tools")

    chat = tools_stack.state.live.config.models[0]
    tools_stack.state.specs.modules.grammars(chat).check = check
    await ask(tools_stack, CALLS, tools=[WEATHER], tool_choice="required")
    grammar = tools_stack.agent.seen[-1].sampling.grammar
    assert grammar is not None
    [tag] = json.loads(grammar.text)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object"}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    body = {"model": "chat", "messages": SAID, "tools": [strict], "tool_choice": "required"}
    assert (await tools_stack.client.post("/v1/chat/completions", json=body)).status_code == 400


async def test_a_schema_that_is_too_long_is_not_even_tried(tools_stack: Stack) -> None:
    async def check(*asked: Any) -> None:
        assert len(asked[2].text) <= CHARS_MAX

    chat = tools_stack.state.live.config.models[0]
    tools_stack.state.specs.modules.grammars(chat).check = check
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 100] * (CHARS_MAX // 100)}}}
    function = {"name": "weather", "parameters": long}
    body = {"model": "chat", "messages": SAID, "max_tokens": 9, "tool_choice": "required"}
    for strict, status in ((False, 200), (True, 400)):
        tools_stack.agent.script = answering([*ids_of(CALLS), 0])
        tool = {"type": "function", "function": {**function, "strict": strict}}
        answer = await tools_stack.client.post(
            "/v1/chat/completions", json=body | {"tools": [tool]}
        )
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "tools"


def test_schemas_stay_as_they_are() -> None:
    from prism.engines.sglang.grammars import parsers

    for const in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        schema = {"type": "object", "properties": {"x": {"const": const}}}
        function = {"name": "weather", "parameters": schema, "strict": True}
        tool = {"type": "function", "function": function}
        _, text = parsers.constraint("qwen25", [tool], "required", True) or ("", "")
        [tag] = json.loads(text)["format"]["tags"]
        assert tag["content"]["json_schema"] == schema


async def test_what_excludes_another_is_refused(tools_stack: Stack) -> None:
    async def check(*_: Any) -> None:
        """Accepts any grammar."""

    chat = tools_stack.state.live.config.models[0]
    tools_stack.state.specs.modules.grammars(chat).check = check
    form = {"response_format": {"type": "json_object"}}
    must = {"tools": [WEATHER], "tool_choice": "required"}
    for fields, param in (
        ({**must, **form}, "tool_choice"),
        ({**must, "min_tokens": 5}, "min_tokens"),
        ({**form, "min_tokens": 5}, "min_tokens"),
    ):
        body = {"model": "chat", "messages": SAID, **fields}
        answer = await tools_stack.client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_answer_goes_on_within_its_reasoning(tools_stack: Stack) -> None:
    for begun, reasoning in (("<think>I had", "Hm."), ("<think>Hm.</think>I", None)):
        said = [*SAID, {"role": "assistant", "content": begun}]
        fields: Any = {"messages": said, "extra_body": {"continue_final_message": True}}
        whole, _ = await ask(tools_stack, "Hm.</think>Yes.", **fields)
        assert getattr(whole.message, "reasoning_content", None) == reasoning


async def test_a_model_without_a_parser_is_named(stack: Stack) -> None:
    body = {"model": "chat", "messages": SAID, "tools": [WEATHER]}
    error = (await stack.client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["message"].startswith(
        "tools: chat does not have a tool_parser; set one in the YAML"
    )
    assert error["param"] == "tools"
