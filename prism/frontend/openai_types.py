"""The bodies of OpenAI's completion requests.

Fields that change nothing here are accepted and ignored; fields whose effect is missing are
refused by name unless they hold their neutral value: nothing is dropped silently.
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prism.frontend.errors import bad_request

STOPS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_IDS_MAX = 1024
PROMPTS_MAX = 128
MESSAGES_MAX = 4096
PARTS_MAX = 1024  # of one message
TEMPLATE_OPTIONS_CHARS_MAX = 1 << 20
# Engines keep counts and ids in 32 bits.
INT32_MAX = 2**31 - 1

_IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
# name -> values that ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}

_SHORT_MESSAGES = 32
_SHORT_CHARS = 16 << 10

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Milliseconds = Annotated[float, Field(gt=0, le=3.6e6)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both routes share. `ignore_eos`, `top_k`, `stop_token_ids`, `return_token_ids`,
    `slo_ttft_ms` and `slo_tpot_ms` are extensions of OpenAI's interface."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_IDS_MAX)] = []
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("must be a non-empty string or a list of them")
        if len(stops) > STOPS_MAX:
            raise ValueError(f"has {len(stops)} strings; at most {STOPS_MAX} are allowed")
        if (longest := max(map(len, stops), default=0)) > STOP_CHARS_MAX:
            raise ValueError(f"has {longest} characters; at most {STOP_CHARS_MAX} are allowed")
        return stops

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be positive, or -1 for all tokens")
        return value

    @property
    def tokens_asked(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """Raises BadRequestError naming the first field whose effect is not provided."""
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                raise bad_request(f"{name}: unknown field; remove it", name)
            if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
                shown = f"{reprlib.repr(value):.80}"
                raise bad_request(f"{name}: {shown} is not supported; remove it", name)


def _same(value: Any, neutral: Any) -> bool:
    """Equal, where True is not 1 and 0 not False: `logprobs: 0` asks for something."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is normalised to a list of texts or token id lists."""

    prompt: list[str] | list[list[int]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_list(cls, value: Any) -> Any:
        prompts = value if isinstance(value, list) else [value]
        if prompts and all(_is_id(p) for p in prompts):
            prompts = [prompts]
        if not 1 <= len(prompts) <= PROMPTS_MAX:
            raise ValueError(f"has {len(prompts)} prompts; give 1 to {PROMPTS_MAX}")
        if not _all_texts(prompts) and not _all_id_lists(prompts):
            raise ValueError(
                "must be a string, a list of strings, a list of token ids, or a list of such lists"
            )
        return prompts


def _all_texts(prompts: list[Any]) -> bool:
    return all(isinstance(p, str) for p in prompts)


def _all_id_lists(prompts: list[Any]) -> bool:
    return all(isinstance(p, list) and all(_is_id(i) for i in p) for p in prompts)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


class Message(BaseModel):
    """`content` as text: parts of type "text" are joined by newlines."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send an earlier answer back with all its empty fields."""
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None and v != []}

    @field_validator("content", mode="before")
    @classmethod
    def _content_text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if len(value) > PARTS_MAX:
            raise ValueError(f"has {len(value)} parts; at most {PARTS_MAX} are allowed")
        for number, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f'part {number} must be {{"type": "text", "text": "..."}}; other kinds are'
                    " not supported"
                )
        return "\n".join(part["text"] for part in value)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. `chat_template_kwargs` are passed to the model's template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("messages", mode="before")
    @classmethod
    def _few_messages(cls, value: Any) -> Any:
        # Before each of them is checked: that takes seconds for hundreds of thousands.
        if isinstance(value, list) and len(value) > MESSAGES_MAX:
            raise ValueError(f"has {len(value)} messages; at most {MESSAGES_MAX} are allowed")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _short_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        if (length := len(json.dumps(value))) > TEMPLATE_OPTIONS_CHARS_MAX:
            most = TEMPLATE_OPTIONS_CHARS_MAX
            raise ValueError(f"has {length} characters; at most {most} are allowed")
        return value

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens differ; give one of them"
            raise bad_request(message, "max_completion_tokens")

    @property
    def is_short(self) -> bool:
        """Its template is rendered in less time than a thread takes."""
        plain = all(isinstance(v, bool | int | str) for v in self.chat_template_kwargs.values())
        texts = [m.content for m in self.messages[: _SHORT_MESSAGES + 1]]
        texts += [str(value) for value in self.chat_template_kwargs.values() if plain]
        return plain and len(texts) <= _SHORT_MESSAGES and sum(map(len, texts)) <= _SHORT_CHARS

    @property
    def tokens_asked(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
