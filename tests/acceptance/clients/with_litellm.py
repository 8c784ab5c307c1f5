"""LiteLLM against a served model: python with_litellm.py URL MODEL. Fails by an assertion."""

import asyncio
import json
import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel

MODEL = sys.argv[2]
SAID = [{"role": "user", "content": "Who are you?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather"}}


class Person(BaseModel):
    name: Literal["ada", "grace"]
    clever: bool


class Provider:
    """Model under the name of one of LiteLLM's providers for such servers."""

    def __init__(self, name: str) -> None:
        server = {"api_base": sys.argv[1], "api_key": "none", "num_retries": 0}
        self.asked: Any = {"model": f"{name}/{MODEL}", "messages": SAID, **server}

    def ask(self, **fields: Any) -> Any:
        return litellm.completion(**self.asked, **fields)

    def streamed(self, **fields: Any) -> Any:
        return litellm.stream_chunk_builder(list(self.ask(stream=True, **fields)))

    def text(self) -> None:
        asked = {"max_tokens": 12, "temperature": 0}
        whole = self.ask(**asked)
        said = whole.choices[0].message.content
        assert said
        assert whole.usage.completion_tokens in range(1, 13)
        streamed = self.streamed(stream_options={"include_usage": True}, **asked)
        assert streamed.choices[0].message.content == said
        assert streamed.usage.completion_tokens == whole.usage.completion_tokens
        also = asyncio.run(litellm.acompletion(**self.asked, **asked))
        assert also.choices[0].message.content == said
        several = self.ask(n=2, logprobs=True, top_logprobs=2, max_tokens=3)
        assert all(choice.logprobs for choice in several.choices)
        assert len(several.choices) == 2

    def structure(self) -> None:
        asked = {"max_tokens": 400, "temperature": 0.5, "seed": 3}
        answer = self.ask(response_format=Person, **asked)
        Person.model_validate_json(answer.choices[0].message.content)

    def tools(self) -> None:
        asked = {"max_tokens": 200, "temperature": 0.5, "seed": 3, "tools": [WEATHER]}
        for choice in ("required", NAMED):
            asked |= {"tool_choice": choice, "parallel_tool_calls": False}
            for answer in (self.ask(**asked), self.streamed(**asked)):
                message = answer.choices[0].message
                [call] = message.tool_calls
                assert call.function.name == "weather"
                assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        told = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "rain"}
        self.asked |= {"messages": [*SAID, message.model_dump(), told]}
        assert self.ask(max_tokens=8, tools=[WEATHER]).choices

    def fields(self) -> None:
        penalties = {"frequency_penalty": 0.1, "presence_penalty": 0.1, "top_p": 0.9}
        about = {"user": "u", "metadata": {"a": "b"}, "logit_bias": {"40": 1}, "stop": ["e"]}
        own = {"extra_body": {"return_slo": True, "priority": 0}}
        assert self.ask(max_tokens=8, **penalties, **about, **own).usage.total_tokens


def completions() -> None:
    server = {"api_base": sys.argv[1], "api_key": "none", "num_retries": 0}
    asked: Any = {"model": f"text-completion-openai/{MODEL}", **server}
    answer = litellm.text_completion(prompt="Once", logprobs=2, echo=True, max_tokens=4, **asked)
    assert answer.choices[0].text.startswith("Once")
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def errors() -> None:
    for model, content, expected in (
        ("none", "So?", litellm.NotFoundError),
        (MODEL, "a " * 5000, litellm.ContextWindowExceededError),
    ):
        asked: Any = {"model": f"openai/{model}", "api_base": sys.argv[1], "api_key": "none"}
        try:
            litellm.completion(messages=[{"role": "user", "content": content}], **asked)
        except expected:
            continue
        raise AssertionError(f"{expected.__name__} was not raised")


for name in ("openai", "hosted_vllm", "litellm_proxy"):
    provider = Provider(name)
    for check in (provider.text, provider.structure, provider.fields, provider.tools):
        check()
completions()
errors()
