"""Instructor against a served model: python with_instructor.py URL MODEL. Fails by an assertion."""

import sys
from typing import Any, Literal

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["ada", "grace"]
    clever: bool


client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
asked: Any = {
    "model": sys.argv[2],
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": 400,
    "max_retries": 1,
    "temperature": 0.5,
    "seed": 3,
}
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode)
    create = made.chat.completions.create
    assert isinstance(create(response_model=Person, **asked), Person), mode
    *_, last = made.chat.completions.create_partial(response_model=Person, **asked)
    assert (last.name in ("ada", "grace"), type(last.clever)) == (True, bool), mode
tools = instructor.from_openai(client, mode=Mode.TOOLS)
person, answer = tools.chat.completions.create_with_completion(response_model=Person, **asked)
assert isinstance(person, Person)
assert answer.usage.completion_tokens > 0
