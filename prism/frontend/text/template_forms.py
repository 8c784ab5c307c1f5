"""Forms of a message that a chat template supports: content as text or as parts, and arguments of
calls as an object or as JSON text.

Templates do not declare their forms. Each template is rendered with marks in a short conversation,
and a form is supported if the prompt contains the marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

_MARKS = ("PrismFirstMark", "PrismLastMark")
_ID = "prismcall"  # nine characters, as Mistral's templates require
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
# A list of parts as Python or JSON, or an object as Python: the form is not supported.
_UNREAD = re.compile(rf"""text['"]: ?['"]{_MARKS[0]}|'{_MARKS[0]}': """)


class Forms(NamedTuple):
    """Forms that one template supports."""

    parts: frozenset[str] = frozenset()  # roles whose content may be in parts
    only_parts: frozenset[str] = frozenset()  # roles whose content must be in parts
    text_arguments: bool = False  # arguments must be JSON text
    null_content: bool = False  # content must be null in a message with tool calls alone


def forms_of(render: Render) -> Forms:
    """Returns the forms of a template. `render` renders messages and tools, or returns an empty
    string if the template rejects them."""
    forms = Forms()
    for role in ("user", "system", "assistant"):
        forms = _with_role(forms, role, render, None)
    for tool_parts, null, text in product((False, True), repeat=3):
        tried = forms._replace(text_arguments=text, null_content=null)
        if tool_parts:
            tried = tried._replace(only_parts=forms.only_parts | {"tool"})
        if _shows(render, _calling(_arguments(), "", tried), [_TOOL]):
            forms = forms._replace(text_arguments=text, null_content=null)
            break
    return _with_role(forms, "tool", render, [_TOOL])


def in_forms(messages: Sequence[Message], forms: Forms) -> list[Message]:
    """Returns the messages converted to these forms. REQUIRES: content is text, or parts of text
    and images; with images it stays in parts."""
    return [_in_form(message, forms) for message in messages]


def _in_form(message: Message, forms: Forms) -> Message:
    made = dict(message)
    content, role = message.get("content"), message["role"]
    has_images = isinstance(content, list) and any(part["type"] == "image" for part in content)
    if isinstance(content, list) and role not in forms.parts and not has_images:
        made["content"] = content = "\n".join(part["text"] for part in content)
    if isinstance(content, str) and role in forms.only_parts:
        made["content"] = [_part(content)]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call_in_form(call, forms) for call in calls]
        if forms.null_content and not content:
            made["content"] = None
    return made


def _call_in_form(call: dict[str, Any], forms: Forms) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if forms.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not forms.text_arguments and isinstance(arguments, str):
        arguments = _object(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _object(arguments: str) -> Any:
    """Returns the parsed arguments, or the text unchanged if it is not JSON."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _with_role(
    forms: Forms, role: str, render: Render, tools: list[dict[str, Any]] | None
) -> Forms:
    text = _shows(render, _conversation(role, " ".join(_MARKS), forms), tools)
    parts = [_part(mark) for mark in _MARKS]
    with_parts = forms._replace(parts=forms.parts | {role})
    if not _shows(render, _conversation(role, parts, with_parts), tools):
        return forms
    return with_parts if text else with_parts._replace(only_parts=forms.only_parts | {role})


def _shows(render: Render, messages: list[Message], tools: list[dict[str, Any]] | None) -> bool:
    prompt = render(messages, tools)
    return all(mark in prompt for mark in _MARKS) and not _UNREAD.search(prompt)


def _conversation(role: str, content: Any, forms: Forms) -> list[Message]:
    """Returns a short conversation with this content in a message of `role`."""
    if role == "tool":
        return _calling({}, content, forms)
    user: Message = {"role": "user", "content": "x"}
    marked: Message = {"role": role, "content": content}
    before: list[Message] = [user] if role == "assistant" else []
    after: list[Message] = [] if role == "user" else [user]
    return in_forms([*before, marked, *after], forms)


def _arguments() -> dict[str, str]:
    return {_MARKS[0]: _MARKS[1]}


def _calling(arguments: dict[str, str], result: Any, forms: Forms) -> list[Message]:
    call = {"id": _ID, "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "tool_call_id": _ID, "content": result},
    ]
    return in_forms(messages, forms)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
