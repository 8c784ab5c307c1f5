"""Request bodies: their common fields, and the bodies without a conversation.

Fields that have no effect here are accepted and ignored. Fields whose effect is not supported are
rejected unless they have their neutral value, so that none is dropped silently.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from prism.frontend.http.error_bodies import bad_request

STOPS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_IDS_MAX = 1024
PROMPTS_MAX = 128
INPUTS_MAX = 2048  # of one request for embeddings
TOKENS_MAX = 1 << 20  # of a body to detokenize; parsing more would block the event loop
CHOICES_MAX = 128  # of one prompt
LOGPROBS_MAX = 20  # likeliest tokens per position
BIASES_MAX = 1024
BIAS_MAX = 100
# Engines keep counts and ids in 32 bits.
INT32_MAX = 2**31 - 1

IGNORED = frozenset({
    "metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "rid",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
})  # fmt: skip
# Field -> its neutral values, besides null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Structure = Annotated[dict[str, Any], Field(max_length=64)]  # each key is checked
Choices = Annotated[int, Field(ge=1, le=CHOICES_MAX)]
Milliseconds = Annotated[float, Field(gt=0, le=3.6e6)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    # As in vLLM: the counts so far in every event, if usage is included.
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # ignored: events are not padded


class RequestBody(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    # Fields that are ignored, and the neutral values of other unsupported fields.
    IGNORED: ClassVar[frozenset[str]] = IGNORED
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    # Name of the request field that limits the output; empty if there is none.
    MAX_TOKENS: ClassVar[str] = "max_tokens"

    model: str

    @property
    def prompt_field(self) -> str:
        """Name of the request field that holds the prompt."""
        return "prompt"

    @property
    def image_urls(self) -> list[str]:
        """Addresses of the prompt's images, in order."""
        return []

    @property
    def image_places(self) -> list[list[dict[str, str]] | None]:
        """Parts of the prompt's messages, which say where its images are. Empty without images."""
        return []

    @property
    def output_tokens_min(self) -> int:
        """Number of tokens that must fit into the context after the prompt."""
        return 0

    def reject_unsupported(self) -> None:
        """Raises BadRequestError naming the first field that is not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in self.IGNORED or value is None:
                continue
            if name not in self.NEUTRAL:
                raise bad_request(f"{name}: unknown field; remove it", name)
            if not any(_same(value, neutral) for neutral in self.NEUTRAL[name]):
                text = f"{reprlib.repr(value):.80}"
                raise bad_request(f"{name}: {text} is not supported; remove it", name)

    def prepare(self) -> None:
        """Does work that grows with the body, in the thread that parses a large body. Raises
        BadRequestError."""


def _same(value: Any, neutral: Any) -> bool:
    """Returns whether the values are equal and both or neither are bool: `logprobs: 0` differs from
    False."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral


class GenerationBody(RequestBody):
    """Base of the bodies for generation. Extensions of OpenAI's API are named as in SGLang and
    vLLM, except for Prism's `slo_ttft_ms`, `slo_tpot_ms` and `return_slo`."""

    ID_PREFIX: ClassVar[str] = "cmpl-"

    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_IDS_MAX)] = []
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=BIASES_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    n: Choices | None = None
    response_format: Structure | None = None
    structured_outputs: Structure | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    return_slo: bool | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
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

    @field_validator("logit_bias")
    @classmethod
    def _logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, bias in (value or {}).items():
            digits = name.isascii() and name.isdigit() and len(name) <= len(str(INT32_MAX))
            if not digits or int(name) > INT32_MAX:
                raise ValueError(
                    f"{name:.20} is not a token id; give ids of the model's vocabulary"
                )
            if not -BIAS_MAX <= bias <= BIAS_MAX:
                raise ValueError(f"{bias:g} is not between -{BIAS_MAX} and {BIAS_MAX}")
        return value

    @property
    def tokens_asked(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def output_tokens_min(self) -> int:
        return self.tokens_asked or 1

    @property
    def choices_asked(self) -> int:
        """Number of choices per prompt that the client sees."""
        return self.n or 1

    @property
    def choices_made(self) -> int:
        """Number of choices generated per prompt, of which the best are shown."""
        return self.choices_asked

    @property
    def logprobs_asked(self) -> int | None:
        """Number of likeliest tokens per position; None for no log probabilities."""
        return None

    @property
    def shows_slo(self) -> bool:
        """True if the usage reports the SLO: by default if the request sets one, since other
        clients may not expect it."""
        if self.return_slo is not None:
            return self.return_slo
        return self.slo_ttft_ms is not None or self.slo_tpot_ms is not None

    def reject_unsupported(self) -> None:
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens differ; give one of them"
            raise bad_request(message, "max_completion_tokens")
        super().reject_unsupported()


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    # 0 requests the prompt alone, with its log probabilities. One token is generated, not shown.
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    prompt: list[str] | list[list[int]]  # normalized to a list of texts or of token id lists
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | Literal[False] | None = None
    echo: bool | None = None
    best_of: Choices | None = None

    @field_validator(
        "prompt",
        mode="before",
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    )
    @classmethod
    def _prompt_list(cls, value: Any) -> Any:
        return _list_of(value, "prompts", PROMPTS_MAX)

    def reject_unsupported(self) -> None:
        super().reject_unsupported()
        if self.hides_output and not self.echo:
            raise bad_request("max_tokens: 0 requires echo: true", "max_tokens")
        if self.choices_made < self.choices_asked:
            raise bad_request(f"best_of: must be >= n ({self.choices_asked})", "best_of")
        if self.stream and self.choices_made > self.choices_asked:
            raise bad_request("best_of: cannot be streamed; remove best_of or stream", "best_of")

    @property
    def hides_output(self) -> bool:
        return self.max_tokens == 0

    @property
    def tokens_asked(self) -> int | None:
        return 1 if self.hides_output else super().tokens_asked

    @property
    def choices_made(self) -> int:
        return self.best_of or self.choices_asked

    @property
    def logprobs_asked(self) -> int | None:
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.logprobs


class EmbeddingsBody(RequestBody):
    """POST /v1/embeddings."""

    MAX_TOKENS = ""

    input: list[str] | list[list[int]]  # normalized to a list of texts or of token id lists
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    slo_ttft_ms: Milliseconds | None = None
    return_slo: bool | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None

    @field_validator(
        "input",
        mode="before",
        json_schema_input_type=str | list[str] | list[int] | list[list[int]],
    )
    @classmethod
    def _input_list(cls, value: Any) -> Any:
        return _list_of(value, "inputs", INPUTS_MAX)

    @property
    def output_tokens_min(self) -> int:
        return 1  # reserved for every request

    @property
    def prompt_field(self) -> str:
        return "input"


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(max_length=TOKENS_MAX)]

    @property
    def prompt_field(self) -> str:
        return "tokens"


def _list_of(value: Any, what: str, most: int) -> Any:
    prompts = value if isinstance(value, list) else [value]
    if prompts and all(_is_id(p) for p in prompts):
        prompts = [prompts]
    if not 1 <= len(prompts) <= most:
        raise ValueError(f"has {len(prompts)} {what}; give 1 to {most}")
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
