"""Fork server that was forked from preloaded imports (`prism.engines.processes.preloaded`)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

_RETRY_S = 0.1


@dataclass(slots=True)
class ForkedProcess:
    """Process that is not a child of this one, with a part of `asyncio.subprocess.Process`.

    The process is killed when `link` is closed, so it ends with this process.
    """

    pid: int
    stdin: asyncio.WriteTransport
    stdout: asyncio.StreamReader
    link: socket.socket
    pidfd: int
    ended: bool = False

    @classmethod
    async def start(cls, path: Path) -> ForkedProcess:
        """Requests a fork at the socket `path` until that succeeds.

        Waits while no process listens there or its imports are not finished. Each try has its own
        pipes. If a try fails after the fork, its pipes are closed, so that fork server ends.
        """
        while True:
            try:
                return await cls._try_start(path)
            except (OSError, ValueError):
                await asyncio.sleep(_RETRY_S)

    @classmethod
    async def _try_start(cls, path: Path) -> ForkedProcess:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            theirs_in, ours_in = os.pipe()
            ours_out, theirs_out = os.pipe()
            reading, writing = os.fdopen(ours_out, "rb", 0), os.fdopen(ours_in, "wb", 0)
            stack.callback(os.close, theirs_in)
            stack.callback(os.close, theirs_out)
            with ExitStack() as unless_forked:
                unless_forked.enter_context(reading)
                unless_forked.enter_context(writing)
                pid, pidfd, link = await _request_fork(path, [theirs_in, theirs_out, 2])
                unless_forked.pop_all()
            stdout = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(stdout)
            await loop.connect_read_pipe(lambda: protocol, reading)
            stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, writing)
            return cls(pid, stdin, stdout, link, pidfd)

    def kill(self) -> None:
        """Sends SIGKILL. Raises ProcessLookupError if the process has ended."""
        if self.ended:
            raise ProcessLookupError
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Waits for the end of the process. Returns 0: only its parent gets the exit status."""
        if not self.ended:
            await _readable(self.pidfd)
            self.ended = True
            self.link.close()
            os.close(self.pidfd)
        return 0


async def _request_fork(path: Path, descriptors: list[int]) -> tuple[int, int, socket.socket]:
    """Returns (pid, pidfd, link) of the fork server.

    Raises OSError or ValueError if the process at `path` ends before it answers.
    """
    loop = asyncio.get_running_loop()
    with ExitStack() as unless_forked:
        link = unless_forked.enter_context(socket.socket(socket.AF_UNIX))
        link.setblocking(False)
        await loop.sock_connect(link, str(path))
        socket.send_fds(link, [b"."], descriptors)
        await _readable(link.fileno())
        pid, (pidfd,), _, _ = socket.recv_fds(link, 64, 1)
        unless_forked.pop_all()
        return int(pid), pidfd, link


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
