"""API keys (their models and rates; only hashes are stored) and CORS origins."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from hashlib import sha256
from urllib.parse import urlsplit

from prism.config.schema.machines import Strict
from prism.errors import ConfigError

# An origin as browsers send it. They compare it literally.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]*)?")
_DEFAULT_PORTS = {"http": 80, "https": 443}  # browsers omit them
_NO_ORIGIN = "null"  # sent for files and sandboxed frames


class AccessYaml(Strict, frozen=True):
    """Access to the HTTP endpoint."""

    # A YAML file with hashes of API keys, their models and rates; `prism-serve new-key` adds one.
    # Relative paths start at this file's folder. Default: no key is required.
    keys: str | None = None
    # An environment variable with more keys: NAME=KEY, separated by commas. It is read only at the
    # start.
    keys_variable: str | None = None
    # Without keys, frontend.host must be an address that no other machine reaches, unless this is
    # true.
    open_to_all: bool = False


class ApiKey(Strict, frozen=True, omit_defaults=True):
    """One entry of the keys' file."""

    name: str
    sha256: str  # of the key, as hexadecimal digits
    models: list[str] = []  # empty: all
    requests_per_minute: int = 0  # 0: unlimited
    tokens_per_minute: int = 0  # of prompts and outputs; 0: unlimited
    operator: bool = False  # may also read /status and /metrics


class KeysFile(Strict, frozen=True):
    """The keys' file."""

    keys: list[ApiKey] = []


def hashed(key: str) -> str:
    """Returns the hash of an API key that the keys' file stores."""
    return sha256(key.encode()).hexdigest()


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError for an origin that no browser sends."""
    for index, origin in enumerate(origins):
        sent = _origin_of(origin)
        if origin in ("*", _NO_ORIGIN) or (sent and origin == sent):
            continue
        remedy = sent or "for example https://chat.example:8080, or * for all"
        raise ConfigError(
            f"frontend.cors_origins[{index}]: {origin!r} is not a valid origin; write {remedy}"
        )


def _origin_of(text: str) -> str:
    """Returns the origin that a browser sends for a page at this address. Empty if it is not an
    address."""
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # the port is not a number up to 65535
        return ""
    host = f"[{host}]" if ":" in host else host
    suffix = "" if port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{port}"
    origin = f"{parts.scheme}://{host}{suffix}"
    return origin if _ORIGIN.fullmatch(origin) else ""


def server_headers(variable: str) -> dict[str, str]:
    """Returns the header with an external model's key, which is in an environment variable. Empty
    without a variable. Raises ConfigError for a key that cannot be sent."""
    if not variable:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set; set it to the key")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the key in {variable} has characters that no header may have")
    return {"authorization": f"Bearer {key}"}
