"""Open the port that clients connect to."""

from __future__ import annotations

import os
import socket

from prism.errors import ConfigError

_BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError naming the key."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(
            f"frontend.host: {host!r} is no address of this machine ({error.strerror}); use"
            " 127.0.0.1, or 0.0.0.0 for all"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"frontend.port: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)};"
            " choose another port or stop what uses it"
        ) from error
