"""`prism-serve new-key` and `new-cluster-key`: makes secrets."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from prism.config.api_keys import KEY_PREFIX, add_key
from prism.config.schema.access import ApiKey, hashed
from prism.curve import new_secret
from prism.errors import ConfigError


def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    keys: Annotated[Path, typer.Option(help="The file of access.keys.")],
    model: Annotated[list[str] | None, typer.Option(help="Its models; default: all.")] = None,
    requests_per_minute: Annotated[int, typer.Option(help="0: unlimited.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="0: unlimited.")] = 0,
    is_operator: Annotated[
        bool, typer.Option("--operator", help="May read /status and /metrics.")
    ] = False,
) -> None:
    """Makes an API key and adds its hash to a file. The key is printed once and not stored."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    limits = (requests_per_minute, tokens_per_minute)
    add_key(keys, ApiKey(name, hashed(key), model or [], *limits, is_operator))
    print(key)


def new_cluster_key(file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Makes the key that authenticates the machines of a cluster: a file for cluster_key, which
    only this user may read. Copy it to each machine."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{new_secret()}\n")
    except OSError as error:
        raise ConfigError(
            f"FILE: cannot make {file}: {error.strerror}; choose another file"
        ) from error
