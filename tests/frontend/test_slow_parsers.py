"""Answers on which a parser takes minutes end in time, as text, and do not delay others.

A model writes what its client tells it to. SGLang's parsers have expressions that backtrack,
and may read a whole call again with each token.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prism.cpu_budget import CpuBudget
from prism.frontend.requests.replies import run_in_thread_if_slow
from prism.queueing.server import BundledRedis
from tests.frontend.conftest import Stack, ids_of, make_config, stack_of
from tests.frontend.scripted_agent import answering
from tests.frontend.test_tool_parsers import parser_of
from tests.frontend.test_tools import SAID, WEATHER
from tests.frontend.tool_forms import FORMS

pytestmark = pytest.mark.usefixtures("parser_modules")

BOMB = f"[a({'a=,' * 60}]"  # backtracking takes longer than the age of the universe
# Parser -> answers that its expressions backtrack on.
BACKTRACKING = {
    "pythonic": (BOMB, f"[{'x' * 32_000}", FORMS["pythonic"][:14] * 2000),
    "dots": (f"<dots_function_call>{' ' * 32_000}",),
    "hunyuan": (FORMS["hunyuan"][:60] * 600,),
    "interns1": (f"<|action_start|> <|plugin|>{' ' * 32_000}",),
}
# Parser -> text whose repetition makes it read everything again with each token.
REPEATED = {
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",  # noqa: RUF001
    "gemma4": "<|tool_call>call:weather{city:",
    "gigachat35": "<｜GCML｜tool_calls>\n",  # noqa: RUF001
    "glm45": "<tool_call>",
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "',
    "hunyuan": "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>',
    "llama3": '<|python_tag|>{"name": "',
    "mistral": "[TOOL_CALLS] [",
    "qwen25": "<tool_call>\n{",
}


def budgets_of(parser: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the characters that each of the parser's calls reads from now on.

    Each character costs a microsecond of the budget, whatever the machine's speed.
    """
    read: list[int] = []

    def call(self: CpuBudget, function: Any, *args: Any) -> Any:
        if self._left_s <= 0:
            raise TimeoutError
        before = len(str(getattr(parser._detector, "_buffer", "")))
        read.append(before + sum(len(arg) for arg in args if isinstance(arg, str)))
        self._left_s -= read[-1] * 1e-6
        return function(*args)

    monkeypatch.setattr(CpuBudget, "call", call)
    return read


@pytest.mark.parametrize("name", BACKTRACKING)
@pytest.mark.parametrize("step", [8, 10**6])
def test_an_answer_that_a_parser_backtracks_on_is_text(name: str, step: int) -> None:
    for text in BACKTRACKING[name]:
        piece = parser_of(name).whole(text)
        assert (piece.text, piece.calls) == (text, []), text[:80]
        parser, said = parser_of(name), ""
        for at in range(0, len(text), step):
            said += parser.push(text[at : at + step], last=at + step >= len(text)).text
        assert said.split() == text.split() or name in ("hunyuan", "dots", "interns1"), text[:80]


@pytest.mark.parametrize("name", REPEATED)
def test_what_a_parser_reads_grows_with_the_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grows linearly, not with the square."""
    for chars in (16_000, 64_000):
        text = (REPEATED[name] * (chars // len(REPEATED[name]) + 1))[:chars]
        parser = parser_of(name)
        with monkeypatch.context() as patch:
            read = budgets_of(parser, patch)
            for at in range(0, chars, 4):
                parser.push(text[at : at + 4], last=at + 4 >= chars)
        assert sum(read) < 101 * chars + 200_000


def test_a_parser_without_a_buffer_is_dropped_when_its_calls_take_long() -> None:
    """Drops GPT-OSS's, which reads all of this with each token: 64,000 characters took 268 s."""
    parser, text = parser_of("gpt-oss"), "<|start|>" * 3000
    said = "".join(parser.push(text[at : at + 4]).text for at in range(0, len(text), 4))
    assert parser._calls is None
    assert text.endswith(said[-9:])


def test_a_reasoning_parser_that_fails_leaves_the_rest_as_text() -> None:
    for turn in range(4):
        parser = parser_of("", reasoning="qwen3", prompt="<think>")
        pieces = [parser.push("abcdefgh") for _ in range(turn)]
        parser._budget._left_s = -1e9
        pieces.append(parser.push("ijklmnop", last=True))
        assert "".join(p.reasoning + p.text for p in pieces) == "abcdefgh" * turn + "ijklmnop"
        assert pieces[-1].text.endswith("ijklmnop")


@pytest.fixture
async def pythonic(
    redis_server: BundledRedis, namespace: str, short_dir: Path, parser_modules: None
) -> AsyncIterator[Stack]:
    config = make_config(redis_server.url, namespace, short_dir)
    chat, base = config.models
    chat = msgspec.structs.replace(chat, adapter="sglang", tool_parser="pythonic")
    async with stack_of(msgspec.structs.replace(config, models=[chat, base])) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_others_are_answered_while_such_an_answer_is_parsed(
    pythonic: Stack, stream: bool
) -> None:
    """Yields to the event loop between two of the 16 choices."""
    pythonic.agent.script = answering([*ids_of(BOMB), 0], "stop", 10**6)
    body = {"model": "chat", "messages": SAID, "tools": [WEATHER], "n": 16, "stream": stream}
    asked = asyncio.create_task(pythonic.client.post("/v1/chat/completions", json=body))
    answered = 0
    while not asked.done():
        assert (await pythonic.client.get("/v1/models")).status_code == 200
        answered += not asked.done()
    response = asked.result()
    if stream:
        events = [json.loads(e) for e in re.findall(r"data: (\{.*\})", response.text)]
        told = [c for e in events for c in e["choices"]]
        texts = [
            "".join(c["delta"].get("content") or "" for c in told if c["index"] == i)
            for i in range(16)
        ]
    else:
        texts = [c["message"]["content"] for c in response.json()["choices"]]
    assert [t.strip() for t in texts] == [BOMB] * 16
    assert answered > 3


async def test_a_parsed_answer_of_some_length_is_shown_in_a_thread() -> None:
    spec: Any = type("Spec", (), {"logprobs": None, "parsing": object(), "embeds": False})
    loops: list[bool] = []

    def made() -> None:
        try:
            loops.append(asyncio.get_running_loop() is not None)
        except RuntimeError:
            loops.append(False)

    for tokens in (256, 257):
        await run_in_thread_if_slow(made, spec, tokens)
    assert loops == [True, False]
