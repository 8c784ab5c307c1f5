"""Whether a checkpoint makes vectors, as sentence-transformers writes it down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prism.errors import ConfigError
from prism.messages.models import EmbeddingSpec
from prism.models.files import Lookup, read_config, text_part, with_defaults

_MODULES = "modules.json"
# What an engine computes: the network, the last token's state, its length set to 1.
_COMPUTED = ("Transformer", "Pooling", "Normalize")


def embedding_of(path: Path, wanted: bool | None, key: str) -> EmbeddingSpec | None:
    """None where the model in directory `path` generates text. `wanted`: what the YAML says at
    `key`; None: the files decide. Raises ConfigError where the engines' vectors would not be those
    that the files describe."""
    described = (path / _MODULES).is_file()
    if wanted is False or (wanted is None and not described):
        return None
    if described:
        _check_modules(path, key)
    config = read_config(path, key)
    text = with_defaults(text_part(config, path, key))
    known = config.get("matryoshka_dimensions") or ()
    return EmbeddingSpec(
        size=Lookup(text, path, key).integer("hidden_size", "n_embd"),
        dimensions=tuple(known),
        any_dimensions=bool(config.get("is_matryoshka")),
    )


def _check_modules(path: Path, key: str) -> None:
    for module in _read(path / _MODULES, key, list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _COMPUTED:
            raise ConfigError(
                f"{key}: {path / _MODULES} has a module {kind!r}, which engines do not compute;"
                " give another model, or write false to have it generate text"
            )
        if kind == "Pooling":
            _check_pooling(path / str(module.get("path", "")) / "config.json", key)


def _check_pooling(file: Path, key: str) -> None:
    """One mode a flag, or the mode's name."""
    pooling = _read(file, key, dict)
    modes = [
        name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True
    ]
    named = pooling.get("pooling_mode")
    modes += [f"pooling_mode_{named}"] if isinstance(named, str) else []
    if modes != ["pooling_mode_lasttoken"]:
        found = ", ".join(mode.removeprefix("pooling_mode_") for mode in modes) or "nothing"
        raise ConfigError(
            f"{key}: {file} pools {found}, and engines pool the last token; give another model, or"
            " write false to have it generate text"
        )


def _read(file: Path, key: str, kind: type[Any]) -> Any:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot read {file}: {error}; repair the file") from error
    parts = found if kind is list and isinstance(found, list) else [found]
    if not isinstance(found, kind) or not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"{key}: {file} is not what sentence-transformers writes; repair it")
    return found
