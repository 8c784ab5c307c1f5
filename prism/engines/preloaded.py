"""A device's imports, kept ready: fork servers are forked from a process that outlives them.

Imports take ten seconds and more, so neither the death of an agent nor that of its fork server may
cost them again. Who wants a fork server connects to a socket, passes the descriptors that shall be
its stdin, stdout and stderr, and gets its pid and a pidfd. When the connection ends, the fork
server is killed: it dies with its agent, also while it is stopped. It outlives this process.

Thread rule: one thread, since it forks. What holds for a fork server's imports holds here.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kvcached.handover.wire import is_same_user
from prism.process import HEARTBEAT_S, Pulse, flush_log, show_as

DESCRIPTORS = 3
_PATIENCE_S = 1.0

log = logging.getLogger("prism.preloaded")


class Preloaded:
    """`serve` is the body of a fork server; it returns the exit status."""

    def __init__(self, path: Path, serve: Callable[[], int]) -> None:
        self._path, self._serve = path, serve
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._clients: dict[int, socket.socket] = {}  # by the pid of the fork server
        path.unlink(missing_ok=True)  # of a predecessor

    def run(self) -> NoReturn:
        """Until a signal ends this process."""
        pulse = Pulse()
        while True:
            pulse.beat()
            self.turn()

    def turn(self) -> None:
        """What has come, after waiting for it for a moment."""
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
        """Again, where something removed the socket's file."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
        self._path.unlink(missing_ok=True)  # something else has its name
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None
        client, _ = self._listener.accept()
        client.settimeout(_PATIENCE_S)
        fds: Sequence[int] = ()
        try:
            if not is_same_user(client):
                raise PermissionError("another user asked")
            _, fds, _, _ = socket.recv_fds(client, 1, DESCRIPTORS)
            if len(fds) != DESCRIPTORS:
                raise ConnectionError(f"{len(fds)} descriptors came instead of {DESCRIPTORS}")
            self._fork(client, fds)
        except OSError as error:
            log.warning("no fork server is started: %s", error)
            client.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, client: socket.socket, fds: Sequence[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._be_fork_server(client, fds)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, pid)
        try:
            with suppress(OSError):  # it is gone already, and so will be the fork server
                socket.send_fds(client, [str(pid).encode()], [pidfd])
        finally:
            os.close(pidfd)

    def _be_fork_server(self, client: socket.socket, fds: Sequence[int]) -> NoReturn:
        """Never returns. `os._exit` skips the exit handlers that the parent registered."""
        status = 1
        try:
            show_as("prism-forks")
            os.setsid()  # the supervisor kills the session of a part that hangs
            self._selector.close()
            for inherited in (self._listener, client, *self._clients.values()):
                if inherited is not None:
                    inherited.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            status = self._serve()
        except BaseException:
            log.exception("the fork server ends")
        finally:
            flush_log()
            os._exit(status)

    def _reap(self) -> None:
        for pid, client in list(self._clients.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(client)
                client.close()
                del self._clients[pid]
