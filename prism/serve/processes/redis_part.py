"""The bundled Redis server as a part that the supervisor watches. No call waits for it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from prism.queueing.server import BundledRedis
from prism.serve.processes.logs import log_tail

# Time for which the status reports data that could not be loaded.
_DAMAGE_REPORTED_S = 600.0


class RedisPart:
    """Part whose heartbeat is answers to PING. `say` prints a line.

    Thread rule: the launcher's main thread.
    """

    name = "redis"

    def __init__(self, server: BundledRedis, say: Callable[[str], None]) -> None:
        self._server, self._say = server, say
        self._damage, self._damaged_s = "", 0.0
        self._connection: socket.socket | None = None
        self._beats = 0

    def start(self) -> None:
        """Starts the server again with its data, or without them if it failed to load them. Raises
        OSError."""
        self.close()
        self._beats = 0
        if why := self._server.load_failure():
            self._put_aside(why)
        self._server.kill()
        if self._server.directory.is_file():  # written by another program
            self._server.directory.unlink()
        self._server.directory.mkdir(exist_ok=True)
        self._server.launch()

    def _put_aside(self, why: str) -> None:
        """Moves damaged data away. Frontends and agents know their contents (decision 027)."""
        try:
            place = self._server.put_aside()
        except OSError as error:
            self._say(
                f"redis could not load its data ({why}), and they could not be moved: {error}"
            )
            return
        self._damage = f"could not load its data ({why}) and started empty; the data are in {place}"
        self._damaged_s = time.monotonic()
        self._say(f"redis {self._damage}")

    def trouble(self) -> str:
        """Returns the problem to report although the server runs, or an empty string."""
        recent = self._damage and time.monotonic() - self._damaged_s < _DAMAGE_REPORTED_S
        return self._damage if recent else ""

    def exit_code(self) -> int | None:
        return self._server.exit_code

    @property
    def cannot_load(self) -> bool:
        """True if the server ended because of its data. The next start is without them."""
        return bool(self._server.load_failure())

    def beats(self) -> int:
        """Returns the number of answers since the start. An error is an answer, such as while data
        are loaded. If the socket's file was removed, the server is ended, since no process could
        connect."""
        if self._beats and self._server.port is None and not self._server.socket_path.is_socket():
            self.end_at_once()
        try:
            if self._connection is None:
                self._ask(self._connect())
            elif self._connection.recv(4096):
                self._beats += 1
                self._ask(self._connection)
            else:
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        return self._beats

    def end_at_once(self) -> None:
        if (pid := self._server.pid) is not None and self._server.running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def tail(self, lines: int) -> list[str]:
        """Returns the last lines of the log."""
        return log_tail(self._server.directory / "redis.log", lines)

    def _connect(self) -> socket.socket:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._connection.connect(str(self._server.socket_path))
        self._connection.send(f"AUTH {self._server.password}\r\n".encode())
        return self._connection

    @staticmethod
    def _ask(connection: socket.socket) -> None:
        connection.send(b"PING\r\n")
