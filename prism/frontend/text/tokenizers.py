"""Tokenizers of the models, with their special tokens and sampling defaults."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prism.errors import ConfigError
from prism.frontend.text.chat_template import ChatTemplate, load_chat_template
from prism.messages.model_spec import ModelSpec
from prism.models.special_tokens import end_ids, read_json, special_tokens
from prism.models.text_part import text_config

log = logging.getLogger(__name__)

# Below this, encoding takes less time than handing it to a thread.
_INLINE_CHARS_MAX = 4096
# Sampling parameter with a default in generation_config.json -> range that requests may use.
DEFAULTS = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 2),
}
# At least this, for tokenizers that shorten text before splitting it (runs of spaces).
_TOKEN_CHARS_MIN = 64


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Tokenizer of a model, with its special tokens and sampling defaults."""

    tokenizer: Tokenizer
    vocab_size: int  # ids below it are valid in a prompt
    eos_ids: tuple[int, ...]  # end a completion
    chat_eos_ids: tuple[int, ...]  # end an answer in a conversation; they include eos_ids
    chat_template: ChatTemplate | None
    template_error: str  # error of the chat template, for which conversations are rejected
    token_chars_max: int  # longest text of one token
    # temperature, top_p, ... of generation_config.json
    sampling_defaults: dict[str, float]
    special_ids: frozenset[int] = frozenset()  # omitted from text by default
    _token_bytes: dict[int, bytes] = field(default_factory=dict)  # cache

    async def encode(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        """Returns the token ids of each text. `special_tokens` adds the model's BOS and EOS tokens.
        Long texts are encoded in a thread, so that streams do not stall."""
        if sum(map(len, texts)) <= _INLINE_CHARS_MAX:
            return self._ids(texts, special_tokens)
        return await asyncio.to_thread(self._ids, texts, special_tokens)

    def _ids(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        # The batch method, since only that releases the interpreter's lock.
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def count(self, text: str) -> int:
        """Returns the number of tokens. REQUIRES: called in a thread for a long text."""
        return len(self._ids([text], special_tokens=False)[0])

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the text of one token, which may be a part of a character."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._decoded(token_id)
        return found

    def _decoded(self, token_id: int) -> bytes:
        text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        piece = self.tokenizer.id_to_token(token_id) or ""
        if "\ufffd" not in text:
            # Decoders drop the space before a text's first word.
            drops_space = piece.startswith("\u2581") and not text.startswith(" ")
            return f"{' ' * drops_space}{text}".encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        known = [_BYTES.get(letter) for letter in piece]
        return bytes(b for b in known if b is not None) if None not in known else text.encode()


def _byte_letters() -> dict[str, int]:
    """Returns letter -> byte of GPT-2's byte-level vocabularies: printable bytes are represented by
    themselves, the others in order from U+0100."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES = _byte_letters()


def load_tokenizers(
    models: Sequence[ModelSpec], unreadable: dict[str, str] | None = None
) -> dict[str, ModelTokenizer]:
    """Returns model name -> tokenizer. Equal files are loaded once.

    If a tokenizer cannot be loaded, adds the reason to `unreadable`, or without it raises
    ConfigError.
    """
    shared: dict[bytes, Tokenizer] = {}
    loaded: dict[str, ModelTokenizer] = {}
    for model in models:
        try:
            loaded[model.name] = made = load_tokenizer(Path(model.path), shared)
            if made.template_error:
                log.error("conversations of %s are not served: %s", model.name, made.template_error)
        except ConfigError as error:
            if unreadable is None:
                raise
            log.error("%s is not served: %s", model.name, error)
            unreadable[model.name] = str(error)
    return loaded


def load_tokenizer(directory: Path, shared: dict[bytes, Tokenizer]) -> ModelTokenizer:
    """Returns the tokenizer of the model in `directory`. `shared`: tokenizers by the bytes of their
    files, which are loaded once. Raises ConfigError."""
    tokenizer = _tokenizer(directory / "tokenizer.json", shared)
    eos_ids, chat_eos_ids = end_ids(directory, tokenizer)
    vocab_size = text_config(read_json(directory / "config.json")).get("vocab_size") or 0
    settings = special_tokens(directory)
    generation = read_json(directory / "generation_config.json")
    added = tokenizer.get_added_tokens_decoder()
    template, template_error = None, ""
    try:
        template = load_chat_template(directory, settings)
    except ConfigError as error:  # completions do not need the template
        template_error = str(error)
    return ModelTokenizer(
        tokenizer=tokenizer,
        vocab_size=max(tokenizer.get_vocab_size(), int(vocab_size)),
        eos_ids=eos_ids,
        chat_eos_ids=chat_eos_ids,
        chat_template=template,
        template_error=template_error,
        token_chars_max=max(_TOKEN_CHARS_MIN, *map(len, tokenizer.get_vocab())),
        sampling_defaults=_sampling_defaults(generation),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
    )


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Returns the defaults that are within the range for requests."""
    defaults: dict[str, float] = {}
    for name, (least, most) in DEFAULTS.items():
        value = generation.get(name)
        if isinstance(value, int | float) and least <= value <= most:
            defaults[name] = int(value) if name == "top_k" else float(value)
    return defaults


def _tokenizer(file: Path, shared: dict[bytes, Tokenizer]) -> Tokenizer:
    try:
        content = file.read_bytes()
        if content not in shared:
            shared[content] = Tokenizer.from_buffer(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load {file}: {error}; save the fast tokenizer again") from error
    tokenizer = shared[content]
    # Saved truncation or padding would change prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
