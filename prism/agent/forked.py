"""A fork server that a process with ready imports forks for this agent (`engines/preloaded.py`)."""

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
    """As much of `asyncio.subprocess.Process` as is needed. It is killed when `link` is closed, so
    it dies with this process."""

    pid: int
    stdin: asyncio.WriteTransport
    stdout: asyncio.StreamReader
    link: socket.socket
    pidfd: int
    ended: bool = False

    @classmethod
    async def start(cls, path: Path) -> ForkedProcess:
        """Waits while nobody listens at `path`, or the imports take their time. Each try has pipes
        of its own: those of a fork server that nobody heard of are closed, and it ends."""
        while True:
            try:
                return await cls._asked(path)
            except (OSError, ValueError):
                await asyncio.sleep(_RETRY_S)

    @classmethod
    async def _asked(cls, path: Path) -> ForkedProcess:
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
                pid, pidfd, link = await _ask(path, [theirs_in, theirs_out, 2])
                unless_forked.pop_all()
            stdout = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(stdout)
            await loop.connect_read_pipe(lambda: protocol, reading)
            stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, writing)
            return cls(pid, stdin, stdout, link, pidfd)

    def kill(self) -> None:
        """Raises ProcessLookupError when it has ended."""
        if self.ended:
            raise ProcessLookupError
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Until it has ended. How, only its parent knows: 0."""
        if not self.ended:
            await _readable(self.pidfd)
            self.ended = True
            self.link.close()
            os.close(self.pidfd)
        return 0


async def _ask(path: Path, descriptors: list[int]) -> tuple[int, int, socket.socket]:
    """(pid, pidfd, link) of the fork server. Raises OSError or ValueError if who is asked dies."""
    loop = asyncio.get_running_loop()
    with ExitStack() as unless_forked:
        link = unless_forked.enter_context(socket.socket(socket.AF_UNIX))
        link.setblocking(False)
        await loop.sock_connect(link, str(path))
        socket.send_fds(link, [b"."], descriptors)
        await _readable(link.fileno())
        said, (pidfd,), _, _ = socket.recv_fds(link, 64, 1)
        unless_forked.pop_all()
        return int(said), pidfd, link


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
