"""API keys: who may use which models over HTTP, and how much. Only hashes are kept."""

from __future__ import annotations

from hashlib import sha256

import msgspec


class AccessYaml(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may use the HTTP endpoint."""

    # A YAML file with hashes of API keys, their models and rates; `prism-serve new-key` adds one.
    # Relative paths start at this file's folder. Default: nobody needs a key.
    keys: str | None = None
    # An environment variable that holds more keys, as NAME=KEY with commas between; it is read at
    # the start alone.
    keys_variable: str | None = None
    # Without keys, frontend.host must be an address that no other machine reaches, unless this is
    # true.
    open_to_all: bool = False


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the keys' file."""

    name: str
    sha256: str  # of the key, as hexadecimal digits
    models: list[str] = []  # empty: all
    requests_per_minute: int = 0  # 0: no bound
    tokens_per_minute: int = 0  # of prompts and outputs; 0: no bound
    operator: bool = False  # may also read /status and /metrics


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey] = []


def hashed(key: str) -> str:
    return sha256(key.encode()).hexdigest()
