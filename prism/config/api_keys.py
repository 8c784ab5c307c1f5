"""Reads, checks and adds API keys."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import indent

import msgspec
import yaml

from prism.config.reader import convert, parse
from prism.config.schema.access import AccessYaml, ApiKey, KeysFile, hashed
from prism.errors import ConfigError

KEY_PREFIX = "sk-prism-"
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}")
# Keys are hashed once and without a salt, which is safe only for long random keys.
_KEY_CHARS_MIN = 20


def read_keys(
    access: AccessYaml, variable: Sequence[ApiKey], base_dir: Path, models: Collection[str]
) -> list[ApiKey]:
    """Returns the keys of the file and of the environment variable (`variable`). Raises
    ConfigError."""
    found = list(_of_file(base_dir / Path(access.keys).expanduser())) if access.keys else []
    found += variable if access.keys_variable else []
    if (access.keys or access.keys_variable) and not found:
        raise ConfigError("access: no key was found; make one with prism-serve new-key")
    for index, key in enumerate(found):
        _check(key, index, models)
    for index, key in enumerate(found):
        if key.name in [other.name for other in found[:index]]:
            raise ConfigError(f"access: two keys have the name {key.name!r}; rename one")
    return found


def add_key(file: Path, key: ApiKey) -> None:
    """Adds a key to the file, which only this user may read. Raises ConfigError."""
    found = list(_of_file(file)) if file.exists() else []
    if key.name in [other.name for other in found]:
        raise ConfigError(f"NAME: {file} already has a key {key.name!r}; choose another")
    _check(key, len(found), key.models)
    partial = file.with_name(f"{file.name}.partial")
    try:
        text = _with(file.read_text() if found else "", [*found, key])
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(text)
        partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"--keys: cannot write {file}: {error.strerror}; choose another file"
        ) from error


def _with(text: str, keys: list[ApiKey]) -> str:
    """Returns `text` with the last of `keys` appended. Keeps comments if an entry can be appended
    to the text; otherwise writes the file anew."""
    whole = msgspec.to_builtins(KeysFile(keys))
    entries = re.findall(r"^( *)- ", text, re.MULTILINE)
    added = yaml.safe_dump([msgspec.to_builtins(keys[-1])], sort_keys=False)
    longer = text.rstrip("\n") + "\n" + indent(added, entries[0] if entries else "")
    try:
        if yaml.safe_load(longer) == whole:
            return longer
    except yaml.YAMLError:
        pass
    return yaml.safe_dump(whole, sort_keys=False)


def _of_file(path: Path) -> list[ApiKey]:
    """Returns the keys of a file. Raises ConfigError."""
    try:
        data = parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"access.keys: cannot read {path}: {why}; correct the path") from error
    except ConfigError as error:
        raise ConfigError(f"access.keys: {path}: {error}") from error
    return convert(data, KeysFile, "access.keys").keys


def variable_keys(name: str | None) -> list[ApiKey]:
    """Returns the keys of this environment variable (NAME=KEY, separated by commas) and removes it,
    so that children do not inherit it. Raises ConfigError."""
    if name is None:
        return []
    found = []
    for part in filter(None, os.environ.pop(name, "").split(",")):
        owner, _, key = part.strip().partition("=")
        if len(key) < _KEY_CHARS_MIN:
            raise ConfigError(
                f"access.keys_variable: ${name} must be NAME=KEY, separated by commas, with keys of"
                f" {_KEY_CHARS_MIN} characters or more"
            )
        found.append(ApiKey(owner, hashed(key)))
    return found


def _check(key: ApiKey, index: int, models: Collection[str]) -> None:
    where = f"access.keys.keys[{index}]"
    if not _NAME.fullmatch(key.name):
        raise ConfigError(
            f"{where}.name: {key.name!r} is not a valid name; write letters and digits"
        )
    if not _HASH.fullmatch(key.sha256):
        raise ConfigError(f"{where}.sha256: is not 64 hexadecimal digits; use prism-serve new-key")
    limits: Mapping[str, int] = {
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
    }
    for name, value in limits.items():
        if value < 0:
            raise ConfigError(f"{where}.{name}: {value} must be >= 0 (0 means unlimited)")
    for model in key.models:
        if model not in models:
            raise ConfigError(f"{where}.models: unknown model {model!r}; correct the name")
