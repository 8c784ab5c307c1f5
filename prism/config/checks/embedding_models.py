"""Detection of embedding models, by the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prism.errors import ConfigError
from prism.messages.model_spec import EmbeddingSpec
from prism.models.files import decoder_of, read_config

_MODULES = "modules.json"
# Modules that engines compute: the network, the last token's state, normalization to length 1.
_COMPUTED = ("Transformer", "Pooling", "Normalize")


def embedding_of(path: Path, wanted: bool | None, key: str) -> EmbeddingSpec | None:
    """Returns the vectors that the model in directory `path` makes, or None if it generates text.

    Raises ConfigError if the engines' vectors would differ from those that the files describe.

    Args:
        path: Directory of the model.
        wanted: Value of the YAML key `key`. None: the files decide.
        key: YAML key, for messages.
    """
    described = (path / _MODULES).is_file()
    if wanted is False or (wanted is None and not described):
        return None
    if described:
        _check_modules(path, key)
    config = read_config(path, key)
    size = decoder_of(config, path, key).hidden_size
    known = config.get("matryoshka_dimensions") or []
    if not isinstance(known, list) or not all(type(n) is int and 0 < n <= size for n in known):
        raise ConfigError(
            f"{key}: {path}/config.json has matryoshka_dimensions {json.dumps(known):.60}, which is"
            f" not a list of numbers of 1 to {size}; correct the file"
        )
    return EmbeddingSpec(
        size=size,
        dimensions=tuple(known),
        any_dimensions=bool(config.get("is_matryoshka")),
    )


def _check_modules(path: Path, key: str) -> None:
    """Raises ConfigError for a module that engines do not compute."""
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
    """Raises ConfigError for another pooling than the last token. The file has a flag for each
    mode, or the mode's name."""
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
    """Returns the contents of a JSON file. Raises ConfigError."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot read {file}: {error}; repair the file") from error
    parts = found if kind is list and isinstance(found, list) else [found]
    if not isinstance(found, kind) or not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"{key}: {file} is not what sentence-transformers writes; repair it")
    return found
