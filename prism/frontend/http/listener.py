"""Opens the sockets that clients and operators connect to."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prism.config.schema.admin import host_and_port
from prism.errors import ConfigError

_BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Port 0 takes a free port. Raises ConfigError naming the key."""
    return _open_port(host, port, "frontend.host", "frontend.port")


def open_admin(address: str) -> socket.socket:
    """Returns the listening socket of `ClusterConfig.admin`. The file of a Unix socket is open to
    this user only, and is kept when the socket is closed. Raises ConfigError."""
    if (found := host_and_port(address)) is not None:
        return _open_port(*found, "frontend.admin", "frontend.admin")
    listener, before = socket.socket(socket.AF_UNIX), os.umask(0o177)
    try:
        if _is_left(address):
            os.unlink(address)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"frontend.admin: cannot listen on {address}: {os.strerror(error.errno or 0)}; choose"
            " another path, or remove what is there"
        ) from error
    finally:
        os.umask(before)
    return listener


@contextmanager
def admin_listener(address: str) -> Iterator[socket.socket]:
    """Opens the socket of `open_admin` and removes its file at exit. Raises ConfigError."""
    with open_admin(address) as listener:
        made = _identity(address)
        try:
            yield listener
        finally:
            # A cluster that was started meanwhile may listen at the same path.
            if made is not None and _identity(address) == made:
                Path(address).unlink(missing_ok=True)


def bound_address(address: str, listener: socket.socket) -> str:
    """Returns `address` with the port of `listener`."""
    found = host_and_port(address)
    if found is None:
        return address
    host = f"[{found[0]}]" if ":" in found[0] else found[0]
    return f"{host}:{listener.getsockname()[1]}"


def _identity(path: str) -> tuple[int, int, int] | None:
    """Returns the identity of a Unix socket's file, or None. It includes the ctime, since a new
    file may get the inode number of a removed one."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _is_left(path: str) -> bool:
    """Returns whether `path` is a socket left by a killed cluster. Raises OSError."""
    if _identity(path) is None:
        return False
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def _open_port(host: str, port: int, host_key: str, port_key: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server raises resolver errors (which are negative) as plain OSError.
        number = error.errno or 0
        if number < 0 or number == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{host_key}: {host!r} is not an address of this machine; use 127.0.0.1, or"
                " 0.0.0.0 for all"
            ) from error
        raise ConfigError(
            f"{port_key}: cannot listen on {host}:{port}: {os.strerror(number)};"
            " choose another port or stop the process that uses it"
        ) from error
