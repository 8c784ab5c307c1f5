"""Body of OpenAI's Responses API, and its conversion to a chat completion.

Responses are not stored: each request has the whole conversation as items of `input`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from prism.frontend.http.error_bodies import bad_request
from prism.frontend.protocol.chat_types import (
    IMAGE,
    TOOLS_MAX,
    ChatBody,
    ConvertedBody,
    ToolName,
    check_count,
    text_of,
)
from prism.frontend.protocol.openai_types import IGNORED, TokenCount

# Fields of a chat completion that have another name in this API, or that its answer cannot show.
# All other fields of chat completions are accepted as extensions.
_NOT_EXTENSIONS = {
    "add_generation_prompt", "best_of", "continue_final_message", "echo", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "n", "reasoning_effort", "response_format",
    "return_token_ids", "stream_options", "top_logprobs",
}  # fmt: skip
_STORED = ("conversation", "previous_response_id", "store")
# Accepted and ignored: reasoning is returned as text.
_INCLUDED = ("reasoning.encrypted_content",)
_CONTENT_PARTS = ("input_text", "output_text", "refusal", "reasoning_text")
# Type of an item -> (required fields, optional fields).
_FIELDS = {
    "message": (("role", "content"), ()),
    "function_call": (("call_id", "name", "arguments"), ()),
    "function_call_output": (("call_id", "output"), ()),
    "reasoning": ((), ("content", "summary")),
}
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]


class Item(BaseModel):
    """Item of `input`. Items of an earlier answer may be sent back unchanged. Parts of `content`,
    `summary` and `output` are joined by newlines."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[str | None, text_of(*_CONTENT_PARTS)] = None
    summary: Annotated[str | None, text_of("summary_text")] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Annotated[str | None, text_of("input_text")] = None
    _parts: list[dict[str, Any]] | None = PrivateAttr(None)  # with images, as of a chat completion

    @model_validator(mode="wrap")
    @classmethod
    def _keep_images(cls, value: Any, handler: ModelWrapValidatorHandler[Item]) -> Item:
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            return handler(value)
        texts = [part for part in content if not _is_image(part)]
        made = handler(value | {"content": texts or ""})
        if made.role != "user":
            raise ValueError("only messages of the role user may have images")
        made._parts = [_chat_part(part) for part in content]
        return made

    @property
    def chat_content(self) -> str | list[dict[str, Any]] | None:
        """Content of a chat completion's message: in parts if it has images."""
        return self._parts or self.content

    @model_validator(mode="before")
    @classmethod
    def _with_its_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # OpenAI's client adds this field to items that it has parsed.
        fields = {k: v for k, v in value.items() if k != "parsed_arguments"}
        fields = {k: v for k, v in fields.items() if v is not None and v != []}
        kind = fields.get("type", "message")
        if kind == "item_reference":
            raise ValueError(
                "item_reference is not supported, since items are not stored; send the item"
            )
        if not isinstance(kind, str) or kind not in _FIELDS:
            return fields
        needed, allowed = _FIELDS[kind]
        if missing := [name for name in needed if name not in fields]:
            raise ValueError(f"a {kind} requires {missing[0]}")
        if other := fields.keys() - {"type", "id", "status", *needed, *allowed}:
            raise ValueError(f"{min(other)!r:.80} is not a field of a {kind}; remove it")
        return fields


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    if not _is_image(part):
        return {"type": "text", "text": part.get("text")}
    if not isinstance(part.get(IMAGE), str):
        raise ValueError("an input_image requires image_url; files are not stored")
    return {"type": IMAGE, IMAGE: {"url": part[IMAGE]}}


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class NamedFunction(BaseModel):
    """Choice of the tool that must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: str


class TextOptions(BaseModel):
    """Format of the output."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: dict[str, Any] | None = None  # text, json_object, or json_schema with a `schema`
    verbosity: str | None = None  # ignored

    def response_format(self) -> dict[str, Any] | None:
        """Returns the format in the shape of chat completions."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        schema = {name: value for name, value in self.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}


class ReasoningOptions(BaseModel):
    """Options of the reasoning, which is always shown in full."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: Annotated[str, Field(max_length=64)] | None = None  # for the model's template
    summary: Literal["auto"] | None = None  # ignored, as is generate_summary
    generate_summary: Literal["auto"] | None = None


class _Chat(ChatBody):
    """Chat completion whose errors name the fields of this API."""

    MAX_TOKENS = "max_output_tokens"
    ID_PREFIX = "resp_"

    @property
    def prompt_field(self) -> str:
        return "input"


class ResponsesBody(ConvertedBody):
    """POST /v1/responses. Other fields of chat completions are accepted as extensions."""

    MAX_TOKENS = "max_output_tokens"
    CHAT = _Chat
    EXTENSIONS = frozenset(ChatBody.model_fields) - _NOT_EXTENSIONS
    IGNORED = (IGNORED - {"metadata", "store", "verbosity"}) | {"stream_options"} | EXTENSIONS
    NAMES = {"messages": "input", "response_format": "text.format"}  # noqa: RUF012
    NEUTRAL = {  # noqa: RUF012 - a ClassVar of the base
        "background": (False,),
        "max_tool_calls": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: TokenCount | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    include: list[str] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] | None = None
    _echo: dict[str, Any] = PrivateAttr()

    @field_validator("input", mode="before", json_schema_input_type=str | list[Item])
    @classmethod
    def _items(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        return check_count(value, "items")

    @field_validator("text", "reasoning", mode="before")
    @classmethod
    def _no_null(cls, value: Any) -> Any:
        return {} if value is None else value

    def reject_unsupported(self) -> None:
        for name in _STORED:
            value = (self.model_extra or {}).pop(name, None)
            if value is not None and value is not False:
                remedy = "responses are not stored; remove it, and send the whole conversation"
                raise bad_request(f"{name}: {remedy} as input", name)
        super().reject_unsupported()
        for name in self.include or ():
            if name not in _INCLUDED:
                raise bad_request(f"include: {name!r:.80} is not supported; remove it", "include")

    def chat_fields(self) -> dict[str, Any]:
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return super().chat_fields() | {
            "messages": _with_instructions(self.instructions, messages_of(self.input)),
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.response_format(),
            "reasoning_effort": self.reasoning.effort,
        }

    def prepare(self) -> None:
        super().prepare()
        self._echo = _echo_of(self)

    @property
    def echo(self) -> dict[str, Any]:
        """Fields that the answer repeats. Long ones are already encoded as JSON."""
        return self._echo


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the messages of a chat completion. Reasoning, text and calls of one answer become one
    message, as templates expect. Raises BadRequestError."""
    messages: list[dict[str, Any]] = []
    called: set[str | None] = set()
    for number, item in enumerate(items):
        if item.type == "function_call_output":
            if item.call_id not in called:
                text = "no earlier function_call has this id; send the whole conversation"
                raise bad_request(f"input[{number}].call_id: {text}", "input")
            result = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            messages.append(result)
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role, "content": item.chat_content})
        else:
            if not messages or not _belongs_to(messages[-1], item):
                messages.append({"role": "assistant", "content": ""})
            _add(messages[-1], item)
            called.add(item.call_id)
    return messages


def _belongs_to(message: dict[str, Any], item: Item) -> bool:
    """Returns whether the item is a part of the answer `message`, in which only calls follow the
    text."""
    if message["role"] != "assistant":
        return False
    return item.type == "function_call" or not (message["content"] or "tool_calls" in message)


def _add(answer: dict[str, Any], item: Item) -> None:
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
    elif item.type == "message":
        answer["content"] = item.content
    else:
        parts = (answer.get("reasoning_content"), item.content or item.summary)
        answer["reasoning_content"] = "\n".join(part for part in parts if part) or None


def _with_instructions(
    instructions: str | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the messages with the instructions first. System messages at the start of the input
    are merged with them, since templates support one system message."""
    if not instructions:
        return messages
    first = list(takewhile(lambda each: each["role"] in ("system", "developer"), messages))
    texts = [instructions, *(each["content"] for each in first)]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(first) :]]


def _echo_of(body: ResponsesBody) -> dict[str, Any]:
    choice = body.tool_choice or "auto"
    tools = [tool.model_dump() for tool in body.tools or ()]
    form: dict[str, Any] = {"format": body.text.format or {"type": "text"}}
    if body.text.verbosity is not None:
        form["verbosity"] = body.text.verbosity
    return {
        "instructions": msgspec.Raw(msgspec.json.encode(body.instructions)),
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "text": msgspec.Raw(msgspec.json.encode(form)),
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
        "tools": msgspec.Raw(msgspec.json.encode(tools)),
    }
