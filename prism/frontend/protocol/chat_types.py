"""Conversations: messages, values for the model's template, and the request bodies with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from prism.errors import BadRequestError
from prism.frontend.http.error_bodies import bad_request, from_validation
from prism.frontend.protocol.openai_types import LOGPROBS_MAX, GenerationBody, RequestBody
from prism.frontend.text.chat_template import GIVEN

MESSAGES_MAX = 4096
PARTS_MAX = 1024  # of one message
TEMPLATE_OPTIONS_CHARS_MAX = 1 << 20

TOOLS_MAX = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]
_SHORT_MESSAGES = 32
_SHORT_TOOLS = 8
_SHORT_CHARS = 16 << 10
IMAGE = "image_url"  # kind of a part of a user's message


def text_of(*kinds: str) -> BeforeValidator:
    """Returns the validator of a text that may be sent in parts of these kinds."""
    return BeforeValidator(lambda value: joined_parts(value, *kinds))


class FunctionCall(BaseModel):
    """Name and arguments of a call."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = "{}"  # JSON as text; an object, as Ollama sends it, is converted

    @field_validator("arguments", mode="before", json_schema_input_type=str | dict[str, Any])
    @classmethod
    def _arguments_text(cls, value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class ToolCall(BaseModel):
    """Tool call in the history."""

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
    """Choice of the tool that must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: FunctionName


class Message(BaseModel):
    """Message of a conversation. The older `function_call` and role "function" of OpenAI's API are
    converted to a tool call and its result."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, text_of("text", IMAGE)]  # without images
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Parts for the template, if the content was sent in parts, and addresses of its images.
    _parts: list[dict[str, str]] | None = PrivateAttr(None)
    _image_urls: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_parts(cls, value: Any, handler: ModelWrapValidatorHandler[Message]) -> Message:
        made = handler(value)
        content = value.get("content") if isinstance(value, dict) else None
        if isinstance(content, list):
            made._parts = [_for_template(part) for part in content]
            made._image_urls = [_image_url(part) for part in content if part["type"] == IMAGE]
        if made._image_urls and made.role != "user":
            raise ValueError("only messages of the role user may have images")
        return made

    @property
    def image_urls(self) -> list[str]:
        """Addresses of the images, in the order of the parts."""
        return self._image_urls

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Drops empty fields: clients send an earlier answer back with all of them."""
        if not isinstance(value, dict):
            return value
        fields = {k: v for k, v in value.items() if v is not None and v != []}
        if "reasoning" in fields:  # newer name
            fields.setdefault("reasoning_content", fields.pop("reasoning"))
        _rename_function(fields)
        if "content" not in fields and fields.get("role") == "assistant" and len(fields) > 1:
            fields["content"] = ""  # a message with tool calls alone
        return fields

    def for_template(self) -> dict[str, Any]:
        """Returns the message with OpenAI's newer role "developer" as "system", and with its
        content in parts if it was sent so."""
        fields = self.model_dump(exclude_none=True)
        if self.role == "developer":
            fields["role"] = "system"
        if self._parts:
            fields["content"] = [dict(part) for part in self._parts]
        return fields

    def texts(self) -> list[str | None]:
        """Returns all texts that a template may render."""
        calls = [call.function for call in self.tool_calls or []]
        texts = [text for call in calls for text in (call.name, call.arguments)]
        return [self.content, self.reasoning_content, self.name, self.tool_call_id, *texts]


def joined_parts(value: Any, *kinds: str) -> Any:
    """Returns the text of a list of parts of these kinds, joined by newlines, without images; any
    other value unchanged. Raises ValueError."""
    if not isinstance(value, list):
        return value
    if len(value) > PARTS_MAX:
        raise ValueError(f"has {len(value)} parts; at most {PARTS_MAX} are allowed")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == IMAGE and IMAGE in kinds:
            _check_image(number, part)
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
        if not isinstance(text, str):
            raise ValueError(
                f'part {number} must be {{"type": "{kinds[0]}", "text": "..."}}; other types are'
                " not supported"
            )
        texts.append(text)
    return "\n".join(texts)


def _check_image(number: int, part: dict[str, Any]) -> None:
    url = part.get(IMAGE)
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url:
        form = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise ValueError(f"part {number} must be {form}")


def _image_url(part: dict[str, Any]) -> str:
    url = part[IMAGE]
    return str(url["url"] if isinstance(url, dict) else url)


def _for_template(part: dict[str, Any]) -> dict[str, str]:
    if part["type"] == IMAGE:
        return {"type": "image"}
    return {"type": "text", "text": part["text"]}


def check_count(value: Any, what: str) -> Any:
    """Returns `value`. Raises ValueError for a list of too many entries, before each of them is
    validated: that takes seconds for hundreds of thousands."""
    if isinstance(value, list) and len(value) > MESSAGES_MAX:
        raise ValueError(f"has {len(value)} {what}; at most {MESSAGES_MAX} are allowed")
    return value


def _rename_function(fields: dict[str, Any]) -> None:
    """Converts OpenAI's older functions to tools. Their calls and results do not have an id; it is
    derived from the function's name."""
    if fields.get("role") == "assistant" and isinstance(call := fields.get("function_call"), dict):
        del fields["function_call"]
        fields.setdefault("tool_calls", [{"id": _call_id(call.get("name")), "function": call}])
    elif fields.get("role") == "function":
        fields["role"] = "tool"
        fields.setdefault("tool_call_id", _call_id(fields.get("name")))


def _call_id(name: Any) -> str:
    """Returns an id of nine letters and digits, as Mistral's templates require."""
    return blake2b(str(name).encode(errors="replace"), digest_size=8).hexdigest()[:9]


def _is_small(values: list[Any], chars: int) -> bool:
    """Returns whether nested `values` have at most `chars` characters. A value that is not a text
    counts as one. Stops at the limit."""
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
    """Conversation that is rendered into a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # for the model's template
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @field_validator("messages", mode="before")
    @classmethod
    def _limit_messages(cls, value: Any) -> Any:
        return check_count(value, "messages")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        if given := sorted(GIVEN & value.keys()):
            raise ValueError(f"{given[0]} is set by the server; remove it")
        if (length := len(json.dumps(value))) > TEMPLATE_OPTIONS_CHARS_MAX:
            most = TEMPLATE_OPTIONS_CHARS_MAX
            raise ValueError(f"has {length} characters; at most {most} are allowed")
        return value

    def reject_unsupported(self) -> None:
        super().reject_unsupported()
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "continue_final_message: the last message must have the role assistant"
            raise bad_request(message, "continue_final_message")
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or []]
        if self.must_call and not names:
            raise bad_request("tool_choice: requires tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            message = f"tool_choice: {choice.function.name!r:.80} is not one of the tools"
            raise bad_request(message, "tool_choice")

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def image_urls(self) -> list[str]:
        return [url for message in self.messages for url in message.image_urls]

    @property
    def image_places(self) -> list[list[dict[str, str]] | None]:
        return [message._parts for message in self.messages] if self.image_urls else []

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def is_short(self) -> bool:
        """True if rendering takes less time than handing the conversation to a thread."""
        tools, options = self.tools or [], list(self.chat_template_kwargs.values())
        if len(self.messages) + len(options) > _SHORT_MESSAGES or len(tools) > _SHORT_TOOLS:
            return False
        texts: list[Any] = [text for message in self.messages for text in message.texts()]
        texts += [part for t in tools for part in (t.function.description, t.function.parameters)]
        plain = all(isinstance(value, bool | int | str) for value in options)
        return plain and _is_small([*texts, *options], _SHORT_CHARS)

    def template_values(self) -> dict[str, Any]:
        """Returns the template's variables other than the messages."""
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

    def reject_unsupported(self) -> None:
        super().reject_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: requires logprobs: true", "top_logprobs")

    @property
    def logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ConvertedBody(RequestBody):
    """Base of the bodies of other APIs, which are converted to chat completions."""

    CHAT: ClassVar[type[ChatBody]]
    # Fields of a chat completion that are accepted as extensions.
    EXTENSIONS: ClassVar[frozenset[str]] = frozenset()
    # Field of a chat completion -> its name in this API, if that is another one.
    NAMES: ClassVar[Mapping[str, str]]
    _chat: ChatBody = PrivateAttr()

    @property
    def chat(self) -> ChatBody:
        """Chat completion equivalent to this body."""
        return self._chat

    @property
    def image_urls(self) -> list[str]:
        return self._chat.image_urls

    @property
    def image_places(self) -> list[list[dict[str, str]] | None]:
        return self._chat.image_places

    def chat_fields(self) -> dict[str, Any]:
        """Returns the chat completion's fields, without extensions. Raises BadRequestError."""
        return {"model": self.model}

    def prepare(self) -> None:
        extra = self.model_extra or {}
        asked = {name: extra[name] for name in extra.keys() & self.EXTENSIONS}
        asked |= self.chat_fields()
        fields = {name: value for name, value in asked.items() if value is not None}
        try:
            chat = self.CHAT.model_validate(fields)
        except ValidationError as error:
            raise self.renamed(from_validation(error, self.CHAT)) from error
        chat.reject_unsupported()
        self._chat = chat

    def renamed(self, error: BadRequestError) -> BadRequestError:
        """Returns `error` with this API's name of the field."""
        name = self.NAMES.get(error.param or "")
        if name is None:
            return error
        return bad_request(name + str(error).removeprefix(error.param or ""), name)


class TokenizeBody(Conversation):
    """POST /tokenize: a text or a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, default_factory=list)]
    prompt: str | None = None
    # By default added to a text; a template writes them itself.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def reject_unsupported(self) -> None:
        if bool(self.messages) is (self.prompt is not None):
            raise bad_request("prompt: give either prompt or messages", "prompt")
        if self.prompt is not None:
            for name in self.model_fields_set & set(Conversation.model_fields) - {"model"}:
                raise bad_request(f"{name}: requires messages", name)
        super().reject_unsupported()

    @property
    def prompt_field(self) -> str:
        return "messages" if self.messages else "prompt"
