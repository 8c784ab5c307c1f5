"""Special tokens in a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prism.errors import ConfigError
from prism.models.text_part import text_config


def end_ids(directory: Path, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that end a completion, and those that end a turn of a conversation, which
    include the former. Raises ConfigError for files that cannot be read."""
    model = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json")
    places = (generation, text_config(model), model)
    named = (place.get("eos_token_id") for place in places)
    eos_ids = _ids(next((ids for ids in named if ids is not None), None))
    settings = special_tokens(directory)
    turn_end = tokenizer.token_to_id(token_text(settings.get("eos_token")) or "")
    return eos_ids, tuple(dict.fromkeys((*eos_ids, *_ids(turn_end))))


def special_tokens(directory: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, with special tokens that only special_tokens_map.json has.
    Raises ConfigError for a file that cannot be read."""
    settings = read_json(directory / "tokenizer_config.json")
    given = {name: value for name, value in settings.items() if value is not None}
    return {**read_json(directory / "special_tokens_map.json"), **given}


def token_text(entry: Any) -> str | None:
    """Returns a special token's text from tokenizer_config.json, which has a string or object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """Returns a file's object, empty if the file does not exist. Raises ConfigError for a file that
    cannot be read."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}; repair the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object; repair the file")
    return content


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))
