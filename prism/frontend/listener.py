"""Open the port that clients connect to."""

from __future__ import annotations

import errno
import os
import socket

from prism.errors import ConfigError

_BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError naming the key."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server gives resolver errors (which are negative) as plain OSError.
        number = error.errno or 0
        if number < 0 or number == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"frontend.host: {host!r} is not an address of this machine; use 127.0.0.1, or"
                " 0.0.0.0 for all"
            ) from error
        raise ConfigError(
            f"frontend.port: cannot listen on {host}:{port}: {os.strerror(number)};"
            " choose another port or stop what uses it"
        ) from error
