"""Conversations: messages, what is said to the model's template, and the bodies that have them."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from prism.frontend.chat_template import GIVEN
from prism.frontend.errors import bad_request
from prism.frontend.openai_types import LOGPROBS_MAX, GenerationBody, RequestBody

MESSAGES_MAX = 4096
PARTS_MAX = 1024  # of one message
TEMPLATE_OPTIONS_CHARS_MAX = 1 << 20

TOOLS_MAX = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]
_SHORT_MESSAGES = 32
_SHORT_TOOLS = 8
_SHORT_CHARS = 16 << 10


class FunctionCall(BaseModel):
    """`arguments`: JSON as text. An object, as Ollama has it, is written as such."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = "{}"

    @field_validator("arguments", mode="before", json_schema_input_type=str | dict[str, Any])
    @classmethod
    def _arguments_text(cls, value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class ToolCall(BaseModel):
    """A call in the history."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: FunctionName


class Message(BaseModel):
    """`content` as text: parts of type "text" are joined by newlines. The older `function_call` and
    role "function" of OpenAI's API are a call of a tool and its result."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    _parts: list[str] | None = PrivateAttr(None)  # texts, where the content came in parts

    @model_validator(mode="wrap")
    @classmethod
    def _keep_parts(cls, value: Any, handler: ModelWrapValidatorHandler[Message]) -> Message:
        made = handler(value)
        content = value.get("content") if isinstance(value, dict) else None
        made._parts = [part["text"] for part in content] if isinstance(content, list) else None
        return made

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send an earlier answer back with all its empty fields."""
        if not isinstance(value, dict):
            return value
        said = {k: v for k, v in value.items() if v is not None and v != []}
        if "reasoning" in said:  # newer name
            said.setdefault("reasoning_content", said.pop("reasoning"))
        _rename_function(said)
        if "content" not in said and said.get("role") == "assistant" and len(said) > 1:
            said["content"] = ""  # it called tools
        return said

    def for_template(self) -> dict[str, Any]:
        """Returns the message with OpenAI's newer role "developer" as "system", and with the parts
        in which its content came."""
        said = self.model_dump(exclude_none=True)
        if self.role == "developer":
            said["role"] = "system"
        if self._parts:
            said["content"] = [{"type": "text", "text": text} for text in self._parts]
        return said

    def texts(self) -> list[str | None]:
        """All that a template may write."""
        calls = [call.function for call in self.tool_calls or []]
        texts = [text for call in calls for text in (call.name, call.arguments)]
        return [self.content, self.reasoning_content, self.name, self.tool_call_id, *texts]

    @field_validator("content", mode="before")
    @classmethod
    def _content_text(cls, value: Any) -> Any:
        return joined_parts(value, "text")


def joined_parts(value: Any, *kinds: str) -> Any:
    """The text of a list of parts, each of one of these kinds; what is no list, as it is. Raises
    ValueError."""
    if not isinstance(value, list):
        return value
    if len(value) > PARTS_MAX:
        raise ValueError(f"has {len(value)} parts; at most {PARTS_MAX} are allowed")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
        if not isinstance(text, str):
            raise ValueError(
                f'part {number} must be {{"type": "{kinds[0]}", "text": "..."}}; other kinds are'
                " not supported"
            )
        texts.append(text)
    return "\n".join(texts)


def bounded(value: Any, what: str) -> Any:
    """`value`, before each of its entries is checked: that takes seconds for hundreds of
    thousands. Raises ValueError."""
    if isinstance(value, list) and len(value) > MESSAGES_MAX:
        raise ValueError(f"has {len(value)} {what}; at most {MESSAGES_MAX} are allowed")
    return value


def _rename_function(said: dict[str, Any]) -> None:
    """Replaces what OpenAI's API had before tools. A call and its result had no id; it is made of
    the function's name."""
    if said.get("role") == "assistant" and isinstance(call := said.get("function_call"), dict):
        del said["function_call"]
        said.setdefault("tool_calls", [{"id": _call_id(call.get("name")), "function": call}])
    elif said.get("role") == "function":
        said["role"] = "tool"
        said.setdefault("tool_call_id", _call_id(said.get("name")))


def _call_id(name: Any) -> str:
    """Returns one of nine letters and digits, as Mistral's templates want it."""
    return blake2b(str(name).encode(errors="replace"), digest_size=8).hexdigest()[:9]


def _is_small(values: list[Any], chars: int) -> bool:
    """Whether the texts in them have so many characters, other values being one. Looks no further
    than that."""
    while values:
        value = values.pop()
        if value is None:
            continue
        chars -= len(value) if isinstance(value, str | list | dict) else 1
        if chars < 0:
            return False
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value
    return True


class Conversation(RequestBody):
    """What the prompt is made of. `chat_template_kwargs` are passed to the model's template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @field_validator("messages", mode="before")
    @classmethod
    def _few_messages(cls, value: Any) -> Any:
        return bounded(value, "messages")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _own_and_short(cls, value: dict[str, Any]) -> dict[str, Any]:
        if given := sorted(GIVEN & value.keys()):
            raise ValueError(f"{given[0]} is what every template is given; remove it")
        if (length := len(json.dumps(value))) > TEMPLATE_OPTIONS_CHARS_MAX:
            most = TEMPLATE_OPTIONS_CHARS_MAX
            raise ValueError(f"has {length} characters; at most {most} are allowed")
        return value

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "continue_final_message: the last message must be the assistant's"
            raise bad_request(message, "continue_final_message")
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or []]
        if self.must_call and not names:
            raise bad_request("tool_choice: needs tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            message = f"tool_choice: there is no tool {choice.function.name!r:.80}"
            raise bad_request(message, "tool_choice")

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def is_short(self) -> bool:
        """Its template is rendered in less time than a thread takes."""
        tools, options = self.tools or [], list(self.chat_template_kwargs.values())
        if len(self.messages) + len(options) > _SHORT_MESSAGES or len(tools) > _SHORT_TOOLS:
            return False
        said: list[Any] = [text for message in self.messages for text in message.texts()]
        said += [part for t in tools for part in (t.function.description, t.function.parameters)]
        plain = all(isinstance(value, bool | int | str) for value in options)
        return plain and _is_small([*said, *options], _SHORT_CHARS)

    def template_values(self) -> dict[str, Any]:
        """What the template may ask for beside the messages."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        values: dict[str, Any] = {"tools": tools if self.uses_tools else None}
        if self.reasoning_effort is not None:
            values["reasoning_effort"] = self.reasoning_effort
        begins = self.add_generation_prompt and not self.continue_final_message
        return {**values, "add_generation_prompt": begins, **self.chat_template_kwargs}


class ChatBody(Conversation, GenerationBody):
    """POST /v1/chat/completions."""

    ID_PREFIX = "chatcmpl-"

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    parallel_tool_calls: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: needs logprobs: true", "top_logprobs")

    @property
    def logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Conversation):
    """POST /tokenize: a text or a conversation. `add_special_tokens`: by default to a text, since a
    template writes its own."""

    messages: Annotated[list[Message], Field(min_length=1, default_factory=list)]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def refuse_unsupported(self) -> None:
        if bool(self.messages) is (self.prompt is not None):
            raise bad_request("prompt: give either prompt or messages", "prompt")
        if self.prompt is not None:
            for name in self.model_fields_set & set(Conversation.model_fields) - {"model"}:
                raise bad_request(f"{name}: needs messages", name)
        super().refuse_unsupported()

    @property
    def prompt_field(self) -> str:
        return "messages" if self.messages else "prompt"
