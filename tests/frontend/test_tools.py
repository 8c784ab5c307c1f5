"""Tool calls and reasoning, told apart by SGLang's parsers, whole and streamed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from prism.frontend.parsers import AnswerParsers
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


@pytest.fixture(autouse=True, scope="module")
def modules() -> Iterator[None]:
    """The parsers' stand-ins must not meet another test's SGLang."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("sglang", "xgrammar"):
            del sys.modules[name]
    sys.modules.pop("prism.engines.sglang.parsers", None)


@pytest.fixture
async def tools_stack(
    redis_server: BundledRedis, namespace: str, short_dir: Path
) -> AsyncIterator[Stack]:
    config = make_config(redis_server.url, namespace, short_dir)
    chat, base = config.models
    chat = msgspec.structs.replace(chat, tool_parser="qwen25", reasoning_parser="qwen3")
    config = msgspec.structs.replace(config, models=[chat, base])
    async with stack_of(config) as made:
        made.services.parsers = AnswerParsers("sglang")
        yield made


async def ask(stack: Stack, text: str, step: int = 1, **body: Any) -> tuple[Any, list[Any]]:
    """The answer whole, and its chunks."""
    stack.agent.script = answering([*ids_of(text), 0], "stop", step)
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
    streamed: dict[int, str] = {}
    for delta in (d for c in chunks for d in c.delta.tool_calls or []):
        streamed[delta.index] = streamed.get(delta.index, "") + (delta.function.arguments or "")
    assert [json.loads(a)["city"] for a in streamed.values()] == cities


async def test_without_calls_the_answer_is_text(tools_stack: Stack) -> None:
    whole, chunks = await ask(tools_stack, "No.", tools=[WEATHER])
    assert (whole.message.content, whole.message.tool_calls) == ("No.", None)
    assert whole.finish_reason == "stop" == chunks[-1].finish_reason
    whole, chunks = await ask(tools_stack, "a <tool", tools=[WEATHER])
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content == "a <tool"
    whole, _ = await ask(tools_stack, "<think>Hm.</think>Yes.", tool_choice="none", tools=[WEATHER])
    assert (whole.message.content, whole.message.reasoning_content) == ("Yes.", "Hm.")


async def test_a_call_that_must_be_made_has_a_grammar(tools_stack: Stack) -> None:
    """Of the one tool, in the form that the parser reads; tried as other grammars are."""
    other = {"type": "function", "function": {"name": "other"}}
    tried: list[str] = []

    async def check(*asked: Any) -> None:
        tried.append(asked[-1])

    tools_stack.services.grammars.check = check  # type: ignore[method-assign]
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", ["weather", "other"]), (named, ["weather"])):
        await ask(tools_stack, CALLS, tools=[WEATHER, other], tool_choice=choice)
        grammar = tools_stack.agent.seen[-1].sampling.grammar
        assert grammar is not None
        assert grammar.kind == "structural_tag"
        form = json.loads(grammar.text)["format"]
        assert form["at_least_one"]
        begins = [tag["begin"] for tag in form["tags"]]
        assert begins == [f'<tool_call>\n{{"name":"{n}", "arguments":' for n in names]
    assert set(tried) == {"tools"}


async def test_a_structure_begins_behind_the_reasoning() -> None:
    from prism.engines.sglang import parsers

    asked = ("json", '{"type": "object"}')
    for prompt, opens in (("x<think>\n", True), ("x<think>\n\n</think>\n\n", False), ("x", False)):
        kind, text = parsers.behind_reasoning("deepseek-r1", prompt, *asked)
        assert (kind == "structural_tag") is opens
        assert opens or (kind, text) == asked
        if opens:
            thought, answer = json.loads(text)["format"]["elements"]
            assert thought["end"] == "</think>"
            assert answer["json_schema"] == {"type": "object"}


async def test_a_model_without_a_parser_is_named(stack: Stack) -> None:
    body = {"model": "chat", "messages": SAID, "tools": [WEATHER]}
    error = (await stack.client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["message"].startswith("tools: chat has no tool_parser; name one in the YAML")
    assert error["param"] == "tools"


LIGHT = """
import sys
from prism.engines.sglang import parsers
assert not parsers.unknown("llama3", "deepseek-r1")
assert "nonsense" in parsers.unknown("nonsense", "")
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
for name in ("qwen25", "llama3", "mistral", "kimi_k2", "pythonic"):
    assert parsers.constraint(name, [tool], "auto", True) is None
    kind, text = parsers.constraint(name, [tool], "required", True)
    assert kind in ("structural_tag", "json") and "structures" not in text, (name, kind, text)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_the_parsers_import_neither_torch_nor_transformers() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)
