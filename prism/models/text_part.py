"""Language model of a checkpoint for text and images or audio, which is served for text alone.

Its config.json has the language model's keys in `text_config`, and its weights have names of the
whole model. An engine gets a folder that describes the language model, and its weights' names in
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PART = "is_language_model_of_another"  # key of such a config.json
_NEW = "model.language_model."  # prefix in files of transformers after 4.51
# Prefixes of models whose config.json has the language model's keys next to `vision_config`.
_FLAT = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")
_OLD = "language_model."
# Keys of the whole model that a language model's config may leave out.
_SHARED = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
)
_TIED = "tie_word_embeddings"  # the whole model's key decides, as in transformers


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the language model's config.json, which is `config` itself without other parts."""
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        return dict(config)
    from kvcached.models import TEXT_DEFAULTS

    left_out = TEXT_DEFAULTS.get(str(part.get("model_type")), {})
    shared = {name: config[name] for name in _SHARED if name in config}
    tied = {name: config[name] for name in (_TIED,) if name in config}
    return left_out | shared | dict(part) | tied


def text_weight(name: str) -> str | None:
    """Returns a weight's name in the language model, None for weights of other parts."""
    if name.startswith(_NEW):
        return f"model.{name.removeprefix(_NEW)}"
    if name.startswith(_OLD):
        return name.removeprefix(_OLD)
    return name if name.startswith(_FLAT) else None


def has_parts(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes more than a language model."""
    return "text_config" in config or "vision_config" in config


@contextmanager
def language_model_folder(model: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yields a folder of the language model: `config` as its config.json, and links to the other
    files."""
    with TemporaryDirectory(prefix="prism-text-") as name:
        folder = Path(name)
        for file in model.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").write_text(json.dumps({**config, PART: True}))
        yield folder
