"""LangChain against a served model: python with_langchain.py URL MODEL. Fails by an assertion."""

import asyncio
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

SERVER: Any = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0}
ASKED: Any = {**SERVER, "model": sys.argv[2], "temperature": 0}
SAID = [SystemMessage("You are a clerk."), HumanMessage("Who are you?")]


class Person(BaseModel):
    """Person with a name."""

    name: Literal["ada", "grace"]
    clever: bool


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Returns the weather in a city."""
    return f"rain in {city}"


def text() -> None:
    chat = ChatOpenAI(**ASKED, max_tokens=12)
    whole = chat.invoke(SAID)
    assert whole.text
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata["output_tokens"] in range(1, 13)
    streamed = reduce(add, chat.stream(SAID, stream_usage=True))
    assert streamed.text == whole.text
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert [answer.text for answer in chat.batch([SAID] * 3)] == [whole.text] * 3

    async def chunks() -> list[str]:
        return [chunk.text async for chunk in chat.astream(SAID)]

    assert "".join(asyncio.run(chunks())) == whole.text
    two = ChatOpenAI(**{**ASKED, "temperature": 1}, max_tokens=8, n=2).generate([SAID, SAID])
    assert [len(generations) for generations in two.generations] == [2, 2]
    tokens = sum(g.message.usage_metadata is not None for gs in two.generations for g in gs)
    assert tokens or two.llm_output["token_usage"]["completion_tokens"] > 0
    likely = chat.bind(logprobs=True, top_logprobs=2).invoke(SAID)
    entries = likely.response_metadata["logprobs"]["content"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
    assert "e" not in chat.invoke(SAID, stop=["e"]).text
    history = [*SAID, AIMessage("A clerk."), HumanMessage([{"type": "text", "text": "So?"}])]
    assert isinstance(chat.invoke(history).text, str)
    responses = ChatOpenAI(**ASKED, max_tokens=12, use_responses_api=True)
    assert responses.invoke(SAID).text == whole.text


def completions() -> None:
    model = OpenAI(**ASKED, max_tokens=8)
    whole = model.generate(["Once", "Twice"])
    assert len(whole.generations) == 2
    assert whole.llm_output["token_usage"]["completion_tokens"] > 0
    assert "".join(model.stream("Once")) == whole.generations[0][0].text


def structure() -> None:
    chat = ChatOpenAI(**{**ASKED, "temperature": 0.5}, max_tokens=400, seed=3)
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            made = chat.with_structured_output(Person, method=method, strict=strict)
            assert isinstance(made.invoke(SAID), Person), (method, strict)
        assert isinstance(list(made.stream(SAID))[-1], Person), method


def tools() -> None:
    chat = ChatOpenAI(**{**ASKED, "temperature": 0.5}, max_tokens=200, seed=3)
    for options in ({"tool_choice": "required"}, {"tool_choice": "weather", "strict": True}):
        bound = chat.bind_tools([weather], parallel_tool_calls=False, **options)
        asked = bound.invoke(SAID)
        [call] = asked.tool_calls
        assert (call["name"], call["args"]["city"] in ("Oslo", "Rome")) == ("weather", True)
        streamed = reduce(add, bound.stream(SAID))
        assert [c["args"] for c in streamed.tool_calls] == [call["args"]]
    told = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    answer = chat.bind_tools([weather]).invoke([*SAID, asked, told])
    assert answer.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


def errors() -> None:
    code = ""
    try:
        ChatOpenAI(**{**ASKED, "model": "none"}).invoke(SAID)
    except openai.NotFoundError as error:
        code = error.code
    assert code == "model_not_found"


for check in (text, completions, structure, tools, errors):
    check()
