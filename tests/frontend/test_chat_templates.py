"""Prompts of chat templates of many families are those of Hugging Face transformers, whatever form
of content and of tool calls a template wants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from prism.errors import BadRequestError
from prism.frontend.protocol.chat_types import ChatBody
from prism.frontend.requests.specs import _rendered
from prism.frontend.text.chat_template import ChatTemplate
from tests.frontend.tiny_model import make_model

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
# What each family's own pages say of messages: content always in parts, or in parts as well;
# arguments of calls as JSON text; no content with calls.
ONLY_PARTS = {"idefics3", "llava"}
PARTS_TOO = {"gemma3", "glm4", "kimi_k2", "llama4", "qwen25_vl"}
TEXT_ARGUMENTS = {"deepseek_r1", "deepseek_v3"}
NULL_CONTENT = {"deepseek_v3"}
TOKENS = {
    "bos_token": "<s>",
    "eos_token": "<|end|>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "sep_token": "<sep>",
}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"callabc{number:02}", "type": "function", "function": function}


def result(number: int, text: str) -> dict[str, Any]:
    said = {"tool_call_id": f"callabc{number:02}", "content": text}
    return {"role": "tool", "name": "weather", **said}


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Größe <b>", "parameters": PARAMETERS},
}
USER = {"role": "user", "content": "Hi, größer € 😀"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Fine."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call(1, city="Köln", days=2)]}
TWO_CALLS = {**CALLS, "tool_calls": [call(1, city="Köln"), call(2, city="Bonn", days=3)]}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER, ANSWER, {**USER, "content": " again \n"}]},
    "no answer begins": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "parts": {"messages": [SYSTEM, {**USER, "content": [part("one"), part("two ")]}]},
    "parts of system": {"messages": [{**SYSTEM, "content": [part("Be brief.")]}, USER]},
    "parts of an answer": {"messages": [USER, {**ANSWER, "content": [part("a"), part("b")]}, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "call": {"messages": [SYSTEM, USER, CALLS, result(1, "Rain.")], "tools": [TOOL]},
    "call and text": {"messages": [USER, {**CALLS, "content": "Hm."}, result(1, "Rain.")]},
    "answer after a call": {"messages": [USER, CALLS, result(1, '{"t": 3}'), ANSWER, USER]},
    "two calls": {"messages": [USER, TWO_CALLS, result(1, "Rain."), result(2, "Sun.")]},
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning_content": "Hm."}, USER]},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from prism.models.hugging_face import import_transformers

    directory = make_model(tmp_path_factory.mktemp("m"))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    return import_transformers().AutoTokenizer.from_pretrained(directory)


def source_of(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text()


def native(message: dict[str, Any], family: str) -> dict[str, Any]:
    """Returns the message in the form that the family's model page documents."""
    made, content = dict(message), message["content"]
    if isinstance(content, list) and family not in ONLY_PARTS | PARTS_TOO:
        made["content"] = "\n".join(each["text"] for each in content)
    if content is None and family not in NULL_CONTENT:
        made["content"] = content = ""
    if isinstance(content, str) and family in ONLY_PARTS:
        made["content"] = [part(content)]
    if "tool_calls" in made and family not in TEXT_ARGUMENTS:
        functions = [each["function"] for each in made["tool_calls"]]
        objects = [{**one, "arguments": json.loads(one["arguments"])} for one in functions]
        calls = zip(made["tool_calls"], objects, strict=True)
        made["tool_calls"] = [{**each, "function": function} for each, function in calls]
    return made


@pytest.mark.parametrize("said", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_prompts_are_those_of_transformers(theirs: Any, family: str, said: str) -> None:
    conversation = CONVERSATIONS[said]
    body = ChatBody.model_validate({"model": "m", **conversation})
    template = ChatTemplate(source_of(family), TOKENS)
    messages = [native(message, family) for message in conversation["messages"]]
    begins = conversation.get("add_generation_prompt", True)
    options = {"tools": conversation.get("tools"), "add_generation_prompt": begins}
    try:
        expected = theirs.apply_chat_template(
            messages, chat_template=source_of(family), tokenize=False, **options
        )
    except (TemplateError, TypeError) as error:
        with pytest.raises(BadRequestError, match=re.escape(str(error))):
            _rendered(body, template)
    else:
        assert _rendered(body, template) == expected


@pytest.mark.parametrize("family", TEMPLATES)
def test_nothing_that_a_user_says_is_lost(family: str) -> None:
    template = ChatTemplate(source_of(family), TOKENS)
    for content in ("first and second", [part("first"), part("second")]):
        said = {"model": "m", "messages": [{"role": "user", "content": content}]}
        prompt = _rendered(ChatBody.model_validate(said), template)
        assert "first" in prompt
        assert "second" in prompt
        assert "'type'" not in prompt


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("family", ["chatml", "idefics3", "qwen25_vl"])
def test_an_answer_that_came_in_parts_goes_on(family: str, parts: bool) -> None:
    begun = {"role": "assistant", "content": [part("It "), part("will")] if parts else "It will"}
    said = {"model": "m", "messages": [USER, begun], "continue_final_message": True}
    prompt = _rendered(ChatBody.model_validate(said), ChatTemplate(source_of(family), TOKENS))
    joined = "It \nwill" if parts and family == "chatml" else "It will"
    assert prompt.endswith(joined)


FORMS = {
    "generation": ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "x"),
    "generation with dashes": ("{%- generation -%} a {%- endgeneration -%}", "a"),
    "a scope of its own": (
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
        "21",
    ),
    "break and continue": (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "02",
    ),
    "tojson": (
        "{{ {'b': '<é>', 'a': [1]} | tojson }}"
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':'), indent=1) }}",
        '{"b": "<é>", "a": [1]}{\n "a":2,\n "b":1\n}',
    ),
    "no documents and tools": (
        "{{ documents is none }}{{ tools is none }}{{ unheard is defined }}",
        "TrueTrueFalse",
    ),
    "special tokens": ("{{ bos_token }}{{ sep_token }}{{ cls_token is defined }}", "<s><sep>False"),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_templates_may_say(theirs: Any, name: str) -> None:
    source, expected = FORMS[name]
    messages = [{"role": "user", "content": "x"}]
    assert ChatTemplate(source, TOKENS).render(messages, {}) == expected
    assert theirs.apply_chat_template(messages, chat_template=source, tokenize=False) == expected


def test_calls_in_openais_older_shape() -> None:
    """Renders `function_call`, and arguments as an object (Ollama's clients), like `tool_calls`."""
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    older = [
        USER,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "weather", "content": "Rain."},
    ]
    as_object = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    newer = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [as_object]},
        {"role": "tool", "name": "weather", "content": "Rain."},
    ]
    template = ChatTemplate(source_of("qwen25"), TOKENS)
    bodies = [ChatBody.model_validate({"model": "m", "messages": said}) for said in (older, newer)]
    prompts = {_rendered(body, template) for body in bodies}
    assert len(prompts) == 1
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompts.pop()
    mistral = _rendered(bodies[0], ChatTemplate(source_of("mistral"), TOKENS))
    call_id = bodies[0].messages[2].tool_call_id
    assert call_id is not None
    assert mistral.count(call_id) == 2


@pytest.mark.parametrize("arguments", ["", "not JSON", "[1]", {}, {"a": [{"b": None}]}])
@pytest.mark.parametrize("family", ["qwen25", "deepseek_r1"])
def test_any_arguments_are_rendered(family: str, arguments: Any) -> None:
    called = {"function": {"name": "weather", "arguments": arguments}}
    said = [USER, {"role": "assistant", "tool_calls": [called]}, result(1, "Rain.")]
    body = ChatBody.model_validate({"model": "m", "messages": said})
    prompt = _rendered(body, ChatTemplate(source_of(family), TOKENS))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert (written or "weather") in prompt
