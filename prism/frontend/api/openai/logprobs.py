"""Log probabilities in OpenAI's two shapes.

The entry of each token is already encoded as JSON: encoding and freeing millions of dicts at once,
for a long answer, would block the event loop.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import Any

import msgspec

from prism.frontend.text.tokenizers import ModelTokenizer
from prism.messages.requests import Logprobs

# OpenAI's value for a token that is impossible.
_LEAST = -9999.0
_encode = msgspec.json.Encoder().encode


def chat_logprobs(
    tokenizer: ModelTokenizer, token_ids: list[int], logprobs: Logprobs
) -> dict[str, Any]:
    """Returns `choice.logprobs` of a chat completion."""
    content = []
    for place, (token_id, value) in enumerate(zip(token_ids, logprobs.values, strict=False)):
        top = _top(logprobs, place)
        likeliest = [_entry(tokenizer, other, chance) for other, chance in top]
        entry = {**_entry(tokenizer, token_id, value), "top_logprobs": likeliest}
        content.append(msgspec.Raw(_encode(entry)))
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builder of `choice.logprobs` of a completion, for consecutive parts of its text.
    `shows_special`: True if the text contains special tokens."""

    def __init__(self, tokenizer: ModelTokenizer, shows_special: bool) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._offset = 0  # of the next token, in characters
        self._characters = getincrementaldecoder("utf-8")("replace")

    def prompt(self, token_ids: list[int], logprobs: Logprobs, text: str) -> dict[str, Any]:
        """Returns the log probabilities of the prompt echoed as `text`. Its first token has
        none."""
        first = self._named(token_ids[:1], text)
        return joined(first, self.part(token_ids[1:], logprobs, text))

    def part(
        self, token_ids: list[int], logprobs: Logprobs, text: str | None = None
    ) -> dict[str, Any]:
        """Returns the log probabilities of a part. `text` is the prompt, or None for output."""
        shown = self._named(token_ids, text)
        shown["token_logprobs"] = [max(value, _LEAST) for value in logprobs.values]
        shown["top_logprobs"] = [
            msgspec.Raw(_encode(self._by_name([*_top(logprobs, place), (token_id, value)])))
            for place, (token_id, value) in enumerate(zip(token_ids, logprobs.values, strict=False))
        ]
        return shown

    def _named(self, token_ids: list[int], text: str | None) -> dict[str, Any]:
        nothing: list[None] = [None] * len(token_ids)
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": nothing,
            "top_logprobs": nothing,
            "text_offset": [self._place(token_id, text) for token_id in token_ids],
        }

    def _place(self, token_id: int, text: str | None) -> int:
        """Returns the offset of the next token in characters. Tokens of one character share its
        offset."""
        place, token = self._offset, self._tokenizer.token_bytes(token_id)
        special = token_id in self._tokenizer.special_ids
        if text is None:
            shown = self._shows_special or not special
        else:  # a prompt may have been written with them
            shown = not special or text.startswith(token.decode(errors="replace"), place)
        if shown:
            self._offset += len(self._characters.decode(token))
        return place

    def _by_name(self, values: list[tuple[int, float]]) -> dict[str, float]:
        return {self._name(token_id): max(value, _LEAST) for token_id, value in values}

    def _name(self, token_id: int) -> str:
        text = self._tokenizer.token_bytes(token_id)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}


def mean(logprobs: Logprobs | None) -> float:
    """Returns the mean log probability of an answer."""
    values = logprobs.values if logprobs else []
    return sum(values) / len(values) if values else 0.0


def _top(logprobs: Logprobs, place: int) -> list[tuple[int, float]]:
    if place >= len(logprobs.top_ids):
        return []
    return list(zip(logprobs.top_ids[place], logprobs.top_values[place], strict=True))


def _entry(tokenizer: ModelTokenizer, token_id: int, value: float) -> dict[str, Any]:
    text = tokenizer.token_bytes(token_id)
    token = text.decode(errors="replace")
    return {"token": token, "logprob": max(value, _LEAST), "bytes": list(text)}
