"""API keys: who may use which models over HTTP, and how much. Only hashes are kept. And whose web
pages may."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from urllib.parse import urlsplit

import msgspec

from prism.errors import ConfigError

# As browsers send it, who compare it letter by letter.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]*)?")
_USUAL_PORTS = {"http": 80, "https": 443}  # never sent
_PAGES_OF_NONE = "null"  # files and sandboxed frames


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


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError for one that no browser sends."""
    for index, origin in enumerate(origins):
        sent = _origin_of(origin)
        if origin in ("*", _PAGES_OF_NONE) or (sent and origin == sent):
            continue
        remedy = sent or "https://chat.example:8080, say, or * for all"
        raise ConfigError(
            f"frontend.cors_origins[{index}]: {origin!r} is no origin of web pages; write {remedy}"
        )


def _origin_of(text: str) -> str:
    """As a browser sends that of a page whose address this may be; empty where it is none."""
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # no number, or beyond 65535
        return ""
    host = f"[{host}]" if ":" in host else host
    behind = "" if port in (None, _USUAL_PORTS.get(parts.scheme)) else f":{port}"
    origin = f"{parts.scheme}://{host}{behind}"
    return origin if _ORIGIN.fullmatch(origin) else ""
