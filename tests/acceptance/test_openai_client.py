"""The openai client against SGLang: choices, log probabilities, structured output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.acceptance.harness import Cluster, cluster_yaml, model_yaml, serving
from tests.acceptance.schemas import schema
from tests.sglang.adapters import make_adapter

pytestmark = pytest.mark.sglang

MODEL = "tiny-llama"
SAID: Any = [{"role": "user", "content": "Who are you?"}]


class Person(BaseModel):
    name: Literal["ada", "grace"]
    clever: bool


@pytest.fixture(scope="module")
def adapter(tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("lora") / "random", MODEL)


@pytest.fixture(scope="module")
def cluster(
    tiny_models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory, adapter: Path
) -> Iterator[Cluster]:
    models = [model_yaml(name, tool_parser="qwen25") for name in tiny_models]
    models[0] |= {"aliases": ["prod"], "lora": [{"name": "random", "path": str(adapter)}]}
    config = cluster_yaml(
        models, [{"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 1}]
    )
    with serving(config, tmp_path_factory.mktemp("client")) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_choices_and_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": SAID, "n": 2, "seed": 1, "max_tokens": 12}
    asked |= {"logprobs": True, "top_logprobs": 2, "logit_bias": {"40": 2}}
    answer = client.chat.completions.create(**asked)
    assert len({c.message.content for c in answer.choices}) == 2
    for choice in answer.choices:
        content = (choice.logprobs and choice.logprobs.content) or []
        assert len(content) <= 12
        assert all(c.logprob <= 0 and len(c.top_logprobs) == 2 for c in content)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {c.index: c.message.content for c in answer.choices}


def test_log_likelihoods_of_a_prompt(client: openai.OpenAI) -> None:
    """Accepts the evaluation harness's form: ids, echo, one more token."""
    prompt = list(range(40, 60))
    asked: Any = {"model": MODEL, "prompt": prompt, "echo": True, "temperature": 0}
    whole = client.completions.create(max_tokens=1, logprobs=1, **asked).choices[0]
    assert whole.logprobs is not None
    values = whole.logprobs.token_logprobs or []
    assert values[0] is None
    assert len(values) == len(prompt) + 1
    longer = [*prompt, 77]
    asked["prompt"] = longer
    again = client.completions.create(max_tokens=1, logprobs=1, **asked).choices[0]
    assert again.logprobs is not None
    same = (again.logprobs.token_logprobs or [])[1 : len(prompt)]
    assert same == pytest.approx(values[1 : len(prompt)], abs=1e-3)


def test_the_best_of_several(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "seed": 3}
    several = client.completions.create(n=4, logprobs=0, **asked)
    best = client.completions.create(best_of=4, logprobs=0, **asked).choices[0]

    def mean(choice: Any) -> float:
        values: list[float] = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    assert mean(best) == pytest.approx(max(map(mean, several.choices)), abs=1e-3)


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    for seed in range(4):
        asked: Any = {"model": MODEL, "messages": SAID, "max_tokens": 200, "seed": seed}
        answer = client.chat.completions.parse(response_format=Person, **asked)
        assert isinstance(answer.choices[0].message.parsed, Person)
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            **asked, stream=True, response_format={"type": "json_object"}, temperature=0
        )
    )
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])
def test_answers_follow_their_schemas(client: openai.OpenAI, count: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        wrong = [each for each in threads.map(partial(mismatch, client), range(count)) if each]
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:3]}"


def mismatch(client: openai.OpenAI, number: int) -> str:
    """Returns the fault of an answer that must follow a schema, or an empty string.

    Answers that the limit on tokens cuts are requested again.
    """
    asked = schema(number)
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": asked}}
    for seed in range(8):
        answer = client.chat.completions.create(
            model=MODEL, messages=SAID, response_format=form, max_tokens=480, seed=seed
        ).choices[0]
        if answer.finish_reason == "stop":
            text = answer.message.content or ""
            try:
                jsonschema.validate(json.loads(text), asked)
            except (ValueError, jsonschema.ValidationError) as error:
                return f"{number}: {text!r:.200}: {error!s:.200}"
            return ""
    return f"{number}: no answer ended"


STRUCTURES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"regex": "(yes|no)"}, ("yes", "no")),
    ({"guided_choice": ["left", "right"]}, ("left", "right")),
    ({"ebnf": 'root ::= "on" | "off"'}, ("on", "off")),
    ({"structured_outputs": {"choice": ["up", "down"]}}, ("up", "down")),
]


@pytest.mark.parametrize(("extra", "expected"), STRUCTURES)
def test_structures_by_other_names(
    client: openai.OpenAI, extra: dict[str, Any], expected: tuple[str, ...]
) -> None:
    asked: Any = {"model": MODEL, "prompt": "So", "max_tokens": 30, "extra_body": extra}
    assert client.completions.create(**asked).choices[0].text in expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "regex: cannot be compiled: Regex parsing error"),
    ({"ebnf": "root ::= nothing"}, "ebnf: cannot be compiled: EBNF parser error"),
    ({"guided_json": {"type": "object", "uniqueItems": True}}, "keyword(s) uniqueItems"),
    ({"regex": "a", "ebnf": "b"}, "ebnf: cannot be combined with regex; remove one of them"),
    ({"json_schema": "{"}, "json_schema: is not valid JSON"),
    ({"regex": "\0"}, "regex: has a NUL character"),
    ({"response_format": {"type": "xml"}}, "response_format: type must be text, json_object"),
]


def test_what_cannot_be_compiled_is_refused_by_name(cluster: Cluster) -> None:
    for extra, message in REFUSED:
        body = {"model": MODEL, "prompt": "x", **extra, "stream": True}
        response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 400, extra
        assert message in response.json()["error"]["message"]
    assert sum(agent["engine_restarts_total"] for agent in cluster.agents()) == 0


async def _many(url: str) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        schema = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
        shape: Any = {"type": "json_schema", "json_schema": schema}
        asked: Any = {"model": MODEL, "messages": SAID, "max_tokens": 200}
        calls = [
            client.chat.completions.create(**asked, seed=n, response_format=shape)
            for n in range(32)
        ]
        return await asyncio.gather(*calls)


def test_answers_to_a_schema_are_valid(cluster: Cluster) -> None:
    answers = asyncio.run(_many(cluster.url))
    for answer in answers:
        Person.model_validate(json.loads(answer.choices[0].message.content))


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("strict", [{}, {"strict": True}])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_that_must_be_made(
    client: openai.OpenAI, choice: Any, strict: dict[str, bool]
) -> None:
    """Calls follow their tool's schema, strict or not."""
    tool = {"type": "function", "function": {**TOOL["function"], **strict}}
    asked: Any = {"model": MODEL, "messages": SAID, "tools": [tool], "tool_choice": choice}
    asked |= {"max_tokens": 60, "seed": 2, "temperature": 0.5}
    calls = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert len(calls) == 1 if isinstance(choice, dict) else calls
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    deltas = [
        delta
        for chunk in client.chat.completions.create(stream=True, **asked)
        for delta in chunk.choices[0].delta.tool_calls or []
        if delta.index == 0
    ]
    assert deltas[0].function.name == "weather"
    said = "".join(delta.function.arguments or "" for delta in deltas)
    assert json.loads(said) == json.loads(calls[0].function.arguments)


def test_the_responses_api(client: openai.OpenAI) -> None:
    """Returns the same answers as chat completions: parsed, called and streamed."""
    asked: Any = {"model": MODEL, "temperature": 0, "input": SAID}
    chat = client.chat.completions.create(
        model=MODEL, temperature=0, messages=SAID, max_tokens=12
    ).choices[0]
    answer = client.responses.create(max_output_tokens=12, **asked)
    assert answer.output_text == chat.message.content
    assert (answer.status == "incomplete") is (chat.finish_reason == "length")
    parsed = client.responses.parse(text_format=Person, max_output_tokens=200, **asked)
    assert isinstance(parsed.output_parsed, Person)
    tool = {"type": "function", **TOOL["function"]}
    asked |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    events: list[Any] = list(client.responses.create(stream=True, **asked))
    streamed, call = events[-1].response.output[0], client.responses.create(**asked).output[0]
    assert (streamed.type, call.type) == ("function_call", "function_call")
    assert json.loads(streamed.arguments) == json.loads(call.arguments)
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_the_messages_api(cluster: Cluster, client: openai.OpenAI) -> None:
    """Returns the same answers as chat completions to Anthropic's client, whole and streamed."""
    asked: Any = {"model": MODEL, "messages": SAID, "max_tokens": 12}
    chat = client.chat.completions.create(temperature=0, **asked).choices[0]
    sampling: Any = {"extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as made:
        with made.messages.stream(**asked, **sampling) as stream:
            streamed = stream.get_final_message()
        for answer in (streamed, made.messages.create(**asked, **sampling)):
            assert answer.content[0].type == "text"
            assert answer.content[0].text == chat.message.content
            assert (answer.stop_reason == "max_tokens") is (chat.finish_reason == "length")
        function = TOOL["function"]
        tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
        one = {"type": "any", "disable_parallel_tool_use": True}
        asked |= {"tools": [tool], "tool_choice": one, "max_tokens": 200}
        call = made.messages.create(**asked, **sampling)
    assert (call.content[-1].type, call.stop_reason) == ("tool_use", "tool_use")
    assert call.content[-1].input["city"] in ("Oslo", "Rome")


def test_adapters_and_aliases_are_models(client: openai.OpenAI) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert (cards["prod"]["root"], cards[f"{MODEL}:random"]["parent"]) == (MODEL, MODEL)
    said = {}
    for name in (MODEL, "prod", f"{MODEL}:random"):
        asked: Any = {"model": name, "prompt": [40, 41, 42, 43], "temperature": 0, "max_tokens": 16}
        answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.model == name
        said[name] = answer.choices[0].text
    assert said[MODEL] == said["prod"] != said[f"{MODEL}:random"]
    with pytest.raises(
        openai.NotFoundError, match=f"available models: {MODEL}, {MODEL}:random, prod"
    ):
        client.completions.create(model=f"{MODEL}:nobody", prompt="x")
