"""Bodies of Anthropic's Messages API, and their conversion to chat completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
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
    joined_parts,
    text_of,
)
from prism.frontend.protocol.openai_types import IGNORED, TokenCount

# Fields of a chat completion that have another name in this API, or that its answer cannot show.
# All other fields of chat completions are accepted as extensions.
_NOT_EXTENSIONS = {
    "add_generation_prompt", "best_of", "continue_final_message", "echo", "logprobs",
    "max_completion_tokens", "messages", "n", "parallel_tool_calls", "response_format",
    "return_slo", "return_token_ids", "stop", "stream_options", "top_logprobs",
}  # fmt: skip
# Type of a block -> its required field.
_BLOCKS = {
    "text": "text",
    "image": "source",
    "thinking": "thinking",
    "redacted_thinking": "data",
    "tool_use": "id",
    "tool_result": "tool_use_id",
}


class ImageSource(BaseModel):
    """Data of an image, or its address."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""

    @property
    def address(self) -> str:
        return self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class Block(BaseModel):
    """Part of a message. Its fields on caching and citations are ignored."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    source: ImageSource | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Annotated[str, text_of("text")] = ""  # result of a tool

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in _BLOCKS:
            raise ValueError(f"block type {kind!r:.40} is not supported; send text or images")
        if value.get(_BLOCKS[kind]) is None:
            raise ValueError(f"a block of the type {kind} requires {_BLOCKS[kind]}")
        return {name: part for name, part in value.items() if part is not None}


class MessageParam(BaseModel):
    """Message of the conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["user", "assistant"]
    content: list[Block]

    @field_validator("content", mode="before", json_schema_input_type=str | list[Block])
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        return check_count(value, "blocks")

    @model_validator(mode="after")
    def _images_of_the_user(self) -> MessageParam:
        if self.role != "user" and any(block.type == "image" for block in self.content):
            raise ValueError("only messages of the role user may have images")
        return self

    def texts(self, kind: str = "text") -> str:
        return "\n".join(getattr(b, kind) for b in self.content if b.type == kind)


class ClientTool(BaseModel):
    """Tool that the client runs."""

    model_config = ConfigDict(strict=True)

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"tool type {kind!r:.40} is not supported; give a custom tool with input_schema"
            )
        return value


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") is (self.name is None):
            raise ValueError('name is required for the type "tool", and not allowed for others')
        return self


class Thinking(BaseModel):
    """Switch for reasoning, for templates with `enable_thinking`. Only `max_tokens` limits the
    tokens of the reasoning."""

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Format of the output."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: OutputFormat | None = None
    effort: str | None = None  # ignored


class _Chat(ChatBody):
    ID_PREFIX = "msg_"


class CountBody(ConvertedBody):
    """POST /v1/messages/count_tokens, and base of the body of /v1/messages. `context_management` is
    ignored: prompts are not edited."""

    IGNORED = IGNORED | {"betas", "cache_control", "context_management"}
    CHAT = _Chat
    NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}  # noqa: RUF012

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | None = None
    tools: Annotated[list[ClientTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _limit_messages(cls, value: Any) -> Any:
        return check_count(value, "messages")

    @field_validator("system", mode="before", json_schema_input_type=str | list[Block] | None)
    @classmethod
    def _system_text(cls, value: Any) -> Any:
        return joined_parts(value, "text")

    @property
    def prompt_field(self) -> str:
        return "messages"

    def chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        # A last message of the assistant is the beginning of the answer.
        continues = self.messages[-1].role == "assistant"
        return super().chat_fields() | {
            "messages": _with_system(self.system, chat_messages(self.messages)),
            "continue_final_message": continues or None,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            **self._template_options(),
        }

    def _template_options(self) -> dict[str, Any]:
        """Returns the options of the template, with the switch for reasoning if it is set."""
        given = (self.model_extra or {}).get("chat_template_kwargs") or {}
        switch = self.thinking.type if self.thinking else "adaptive"
        if switch == "adaptive" or not isinstance(given, dict):
            return {}  # the extension alone, which is checked with the other fields
        return {"chat_template_kwargs": {"enable_thinking": switch == "enabled"} | given}


class MessagesBody(CountBody):
    """POST /v1/messages. Other fields of chat completions are accepted as extensions."""

    EXTENSIONS = frozenset(ChatBody.model_fields) - _NOT_EXTENSIONS
    IGNORED = CountBody.IGNORED | EXTENSIONS

    max_tokens: TokenCount
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    stream: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        form = self.output_config.format if self.output_config else None
        schema = {"schema": form.json_schema} if form else None
        return super().chat_fields() | {
            "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def chat_messages(turns: Sequence[MessageParam]) -> list[dict[str, Any]]:
    """Returns the messages of a chat completion. Tool results come before the text of the same
    user message. Raises BadRequestError."""
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            messages.append(_answer(turn))
            called |= {block.id for block in turn.content if block.type == "tool_use"}
            continue
        results = [block for block in turn.content if block.type == "tool_result"]
        for block in results:
            if block.tool_use_id not in called:
                text = f"messages[{number}]: tool_use {block.tool_use_id!r:.80} does not precede it"
                raise bad_request(text, "messages")
            result = {"tool_call_id": block.tool_use_id, "content": block.content}
            messages.append({"role": "tool", **result})
        if any(block.type in ("text", "image") for block in turn.content) or not results:
            messages.append({"role": "user", "content": _user_content(turn)})
    if turns[-1].role == "assistant" and "tool_calls" in messages[-1]:
        raise bad_request("messages: the last tool_use requires a tool_result", "messages")
    return messages


def _user_content(turn: MessageParam) -> str | list[dict[str, Any]]:
    """Returns the text of a user's message, in parts if it has images."""
    if not any(block.type == "image" for block in turn.content):
        return turn.texts()
    return [_part(block) for block in turn.content if block.type in ("text", "image")]


def _part(block: Block) -> dict[str, Any]:
    if block.type == "image" and block.source is not None:
        return {"type": IMAGE, IMAGE: {"url": block.source.address}}
    return {"type": "text", "text": block.text}


def _answer(turn: MessageParam) -> dict[str, Any]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in turn.content
        if block.type == "tool_use"
    ]
    message = {"role": "assistant", "content": turn.texts()}
    reasoning = turn.texts("thinking")
    return (
        message
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, *messages] if system else messages


def _chat_tool(tool: ClientTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _chat_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
