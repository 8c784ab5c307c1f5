"""Process that holds a device's imports and forks fork servers, which it outlives.

Imports take ten seconds or more, so they are not repeated after the death of an agent or of a fork
server. An agent connects to a socket, passes the descriptors for the fork server's stdin, stdout
and stderr, and receives its pid and a pidfd. When the connection ends, the fork server is killed,
so it dies with its agent, even if it is stopped. A fork server survives the death of this process.

Thread rule: one thread, since it forks. The rules for imports of a fork server apply here too.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from kvcached.handover.wire import is_same_user
from prism.process import HEARTBEAT_S, HeartbeatWriter, fork_child

DESCRIPTORS = 3
_RECEIVE_TIMEOUT_S = 1.0

log = logging.getLogger("prism.preloaded")


class Preloaded:
    """Forks a fork server for each client of the socket.

    Args:
        path: the socket's file.
        serve: runs a fork server and returns its exit status.
    """

    def __init__(self, path: Path, serve: Callable[[], int]) -> None:
        self._path, self._serve = path, serve
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._clients: dict[int, socket.socket] = {}  # by the pid of the fork server
        path.unlink(missing_ok=True)  # left by an earlier process

    def run(self) -> NoReturn:
        """Serves until a signal ends this process."""
        heartbeat = HeartbeatWriter()
        while True:
            heartbeat.beat()
            self.poll()

    def poll(self) -> None:
        """Handles events, after waiting for them for up to `HEARTBEAT_S`."""
        if not self._path.is_socket():
            self._listen()
        for key, _ in self._selector.select(HEARTBEAT_S):
            if key.data is None:
                self._accept()
            else:
                self._selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
        self._reap()

    def _listen(self) -> None:
        """Creates the socket, also when its file has been removed or replaced."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
        self._path.unlink(missing_ok=True)  # a file of another kind
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None
        client, _ = self._listener.accept()
        client.settimeout(_RECEIVE_TIMEOUT_S)
        fds: Sequence[int] = ()
        try:
            if not is_same_user(client):
                raise PermissionError("the client belongs to another user")
            _, fds, _, _ = socket.recv_fds(client, 1, DESCRIPTORS)
            if len(fds) != DESCRIPTORS:
                raise ConnectionError(f"expected {DESCRIPTORS} descriptors, received {len(fds)}")
            self._fork(client, fds)
        except OSError as error:
            log.warning("cannot start a fork server: %s", error)
            client.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, client: socket.socket, fds: Sequence[int]) -> None:
        run = partial(self._run_fork_server, client, fds)
        pid = fork_child("prism-forks", run, log, "the fork server", outlives=True)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, pid)
        try:
            with suppress(OSError):  # the client is gone: `poll` will kill the fork server
                socket.send_fds(client, [str(pid).encode()], [pidfd])
        finally:
            os.close(pidfd)

    def _run_fork_server(self, client: socket.socket, fds: Sequence[int]) -> int:
        """Runs in the child. Returns the exit code."""
        os.setsid()  # the supervisor kills the session of a process that hangs
        self._selector.close()
        for inherited in (self._listener, client, *self._clients.values()):
            if inherited is not None:
                inherited.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        return self._serve()

    def _reap(self) -> None:
        for pid, client in list(self._clients.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(client)
                client.close()
                del self._clients[pid]
