"""Check of the files with which a model reads and writes text: tokenizer, template, defaults."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from kvcached.models import shape_of_config
from prism.config.schema.cluster_config import ClusterConfig
from prism.errors import BadRequestError, ConfigError
from prism.frontend.text.tokenizers import DEFAULTS, ModelTokenizer, load_tokenizer
from prism.models.config_values import end_ids_of, is_number
from prism.models.special_tokens import read_json, special_tokens, token_text
from prism.models.text_part import text_config

_MARK = "PrismMark"
_LEAST = {"top_k": -1}  # -1: none, as 0 is


def check_texts(config: ClusterConfig) -> None:
    """Raises ConfigError for a model whose prompts or answers would be wrong: one line with the
    YAML key, the file and what to change."""
    shared: dict[bytes, Tokenizer] = {}
    for index, model in enumerate(config.models):
        path = Path(model.path)
        try:
            tokenizer = load_tokenizer(path, shared)
            _check_vocabulary(path, tokenizer.tokenizer)
            if model.embedding is None:
                _check_generation(path)
                _check_template(path, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{config.source}: models[{index}].path: {error}") from error


def _check_vocabulary(path: Path, tokenizer: Tokenizer) -> None:
    rows = _vocab_size(path)
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if last >= rows:
        raise ConfigError(
            f"{path}/tokenizer.json has token {last} ({tokenizer.id_to_token(last)!r}), but"
            f" config.json has vocab_size {rows}; save the model's own tokenizer there"
        )
    try:
        ids = tokenizer.encode(_MARK, add_special_tokens=False).ids
        problem = "" if ids else f"makes no tokens of the text {_MARK!r}"
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        problem = f"cannot encode the text {_MARK!r}: {error}"
    if problem:
        raise ConfigError(f"{path}/tokenizer.json {problem}; save the model's own tokenizer there")
    end = special_tokens(path).get("eos_token")
    if end is not None and tokenizer.token_to_id(token_text(end) or "") is None:
        raise ConfigError(
            f"{path}/tokenizer_config.json has eos_token {json.dumps(end):.60}, which is not a"
            " token of tokenizer.json; correct one of them"
        )


def _check_generation(path: Path) -> None:
    file = path / "generation_config.json"
    generation = read_json(file)
    for name in DEFAULTS:
        value = generation.get(name)
        if value is not None and not is_number(value):
            raise ConfigError(
                f"{file} has {name} {json.dumps(value):.60}, which is not a number; correct the"
                " file"
            )
        if value is not None and not value >= _LEAST.get(name, 0):
            raise ConfigError(
                f"{file} has {name} {value:g}, which must be >= {_LEAST.get(name, 0)}; correct the"
                " file"
            )
    own = file, generation
    of_model = path / "config.json", text_config(read_json(path / "config.json"))
    named, values = own if end_ids_of(generation) else of_model
    rows = _vocab_size(path)
    for one in end_ids_of(values):
        if type(one) is not int or not 0 <= one < rows:
            raise ConfigError(
                f"{named} has eos_token_id {json.dumps(one):.60}, which is not a token of the"
                f" vocabulary of {rows} tokens; correct the file"
            )


def _check_template(path: Path, tokenizer: ModelTokenizer) -> None:
    if tokenizer.template_error:
        raise ConfigError(tokenizer.template_error)
    if tokenizer.chat_template is None:
        return
    try:
        prompt = tokenizer.chat_template.render([{"role": "user", "content": _MARK}], {})
        problem = "" if _MARK in prompt else "leaves out the user's message"
    except BadRequestError as error:
        problem = f"fails for a message of a user: {error.__cause__}"
    if problem:
        raise ConfigError(f"{path}: the chat template {' '.join(problem.split())}; repair it")


def _vocab_size(path: Path) -> int:
    return shape_of_config(read_json(path / "config.json")).vocab_size
