"""`frontend.admin`: address of the pages for operators, if it is not the API's port."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from prism.errors import ConfigError

_PATH_BYTES_MAX = 107  # sun_path (unix(7))


def admin_address(text: str, base_dir: Path) -> str:
    """Returns HOST:PORT, the absolute path of a Unix socket, or "" for none. Raises ConfigError."""
    if not text or host_and_port(text) is not None:
        return text
    if "/" not in text:
        raise ConfigError(
            f"frontend.admin: {text!r} is neither HOST:PORT nor a path; write 127.0.0.1:8001, for"
            " example, or ./admin.sock for a Unix socket"
        )
    path = str(base_dir / Path(text).expanduser())
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ConfigError(
            f"frontend.admin: {path} is too long for a Unix socket (over {_PATH_BYTES_MAX} bytes);"
            " choose a shorter path"
        )
    return path


def host_and_port(address: str) -> tuple[str, int] | None:
    """Returns None if `address` is not HOST:PORT. An IPv6 address is in brackets. Port 0 is any
    free one."""
    if "/" in address:
        return None
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is not a number up to 65535
        return None
    return None if host is None or port is None or "@" in address else (host, port)
