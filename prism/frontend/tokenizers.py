"""The tokenizer of each model, with what its files say about special tokens."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prism.errors import ConfigError
from prism.frontend.chat_template import ChatTemplate, load_chat_template, token_text
from prism.messages.models import ModelSpec

log = logging.getLogger(__name__)

# Below this, encoding takes less time than handing it to a thread.
_INLINE_CHARS_MAX = 4096
# Longer than tokens of ordinary text are, for tokenizers that shorten it first (runs of spaces).
_TOKEN_CHARS_MIN = 64


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer, and what the model's files say about its special tokens."""

    tokenizer: Tokenizer
    vocab_size: int  # ids below it are valid in a prompt
    eos_ids: tuple[int, ...]  # end a completion
    chat_eos_ids: tuple[int, ...]  # end a turn of a conversation; they include eos_ids
    chat_template: ChatTemplate | None
    token_chars_max: int  # longest text of one token

    async def encode(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        """Token ids of each; `special_tokens` adds what the model wants around a text (BOS). Long
        texts are encoded in a thread, so that streams do not stall."""
        if sum(map(len, texts)) <= _INLINE_CHARS_MAX:
            return self._ids(texts, special_tokens)
        return await asyncio.to_thread(self._ids, texts, special_tokens)

    def _ids(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        # The call for a batch, since it alone lets go of the interpreter's lock.
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [list(encoding.ids) for encoding in encodings]


def load_tokenizers(
    models: Sequence[ModelSpec], unreadable: dict[str, str] | None = None
) -> dict[str, ModelTokenizer]:
    """Model name -> its tokenizer. Equal files are loaded once.

    Raises ConfigError for one that cannot be loaded, or puts the reason into `unreadable`.
    """
    shared: dict[bytes, Tokenizer] = {}
    loaded: dict[str, ModelTokenizer] = {}
    for model in models:
        try:
            loaded[model.name] = _load(Path(model.path), shared)
        except ConfigError as error:
            if unreadable is None:
                raise
            log.error("%s is not served: %s", model.name, error)
            unreadable[model.name] = str(error)
    return loaded


def _load(directory: Path, shared: dict[bytes, Tokenizer]) -> ModelTokenizer:
    tokenizer = _tokenizer(directory / "tokenizer.json", shared)
    settings = _read_json(directory / "tokenizer_config.json")
    model = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json")
    text_model = model.get("text_config") or model
    eos_ids = _ids(generation.get("eos_token_id", text_model.get("eos_token_id")))
    turn_end = tokenizer.token_to_id(token_text(settings.get("eos_token")) or "")
    return ModelTokenizer(
        tokenizer=tokenizer,
        vocab_size=max(tokenizer.get_vocab_size(), int(text_model.get("vocab_size") or 0)),
        eos_ids=eos_ids,
        chat_eos_ids=tuple(dict.fromkeys((*eos_ids, *_ids(turn_end)))),
        chat_template=load_chat_template(directory, settings),
        token_chars_max=max(_TOKEN_CHARS_MIN, *map(len, tokenizer.get_vocab())),
    )


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


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}; repair the file") from error
    return content if isinstance(content, dict) else {}


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))
