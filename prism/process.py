"""Child processes that never outlive their parent.

A parent starts a child with `child_environment()`. The child calls `die_with_parent()` first in its
main. A foreign program is started as `[*wrapped_command(), "program", ...]`: the wrapper calls
`die_with_parent()` and then becomes the program. Linux only (PR_SET_PDEATHSIG).

The kernel sends the signal when the *thread* that started the child ends. Start children from a
thread that lives as long as the process.

A child reports that its event loop runs by a counter in an inherited memfd, which needs neither a
file system nor a clock. The loop itself counts: a thread would keep counting while the loop hangs.
A child also stops counting if one of the loops in its `LoopWatchdog` hangs.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import signal
import sys
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

PARENT_VARIABLE = "PRISM_PARENT_PID"
HEARTBEAT_VARIABLE = "PRISM_HEARTBEAT_FD"
HEARTBEAT_S = 0.5
OPEN_FILES_MAX = 65536
LOG_LEVEL_VARIABLE = "PRISM_LOG_LEVEL"
_SILENT_BEATS = 25  # missed beats before the stalled loops are logged
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_COUNT_BYTES = 8
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def child_environment() -> dict[str, str]:
    """Returns this process's environment with its pid, which `die_with_parent` checks."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def die_with_parent(parent_pid: int | None = None, sig: int = signal.SIGKILL) -> None:
    """Asks the kernel to send `sig` to this process when its parent ends.

    The request is not inherited, so call it again after a fork. Raises OSError if the kernel
    refuses.

    Args:
        parent_pid: Pid of the parent. By default it is read from the environment. Does nothing
            if it is not there (the process was started by hand).
        sig: Signal to send. Sent at once if the parent has already ended.
    """
    text = os.environ.get(PARENT_VARIABLE)
    expected = parent_pid if parent_pid is not None else int(text) if text else None
    if expected is None:
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != expected:
        os.kill(os.getpid(), sig)


def set_process_name(name: str) -> None:
    """Sets the name of this process in `ps` and `top`, up to 15 bytes. A forked process would
    otherwise show its parent's."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def fork_child(
    name: str, main: Callable[[], int], log: logging.Logger, what: str, *, outlives: bool = False
) -> int:
    """Forks a child that runs `main`. Returns its pid.

    The child exits with the status that `main` returns, or with 1 after an exception, which is
    logged as a failure of `what`. `os._exit` skips the parent's exit handlers. REQUIRES: this
    process has one thread.

    Args:
        name: name of the process.
        outlives: True if the child may outlive this process.
    """
    parent_pid = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        if not outlives:
            die_with_parent(parent_pid)
        set_process_name(name)
        status = main()
    except BaseException:
        log.exception("%s failed", what)
    finally:
        flush_log()
        os._exit(status)


def configure_logging(
    text: str = "%(asctime)s %(levelname)s %(name)s: %(message)s",
) -> None:
    """Configures logging to stderr at the launcher's --log-level, which is in the environment.
    Replaces an earlier configuration."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").upper()
    logging.basicConfig(level=level, format=text, force=True)


def keep_private(*, core_dumps: bool = False) -> None:
    """Makes files of this process and its children private, and disables core files, which would
    hold prompts."""
    os.umask(0o077)
    if core_dumps:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # Not 0: it means unlimited where the kernel pipes cores into a program, unlike 1 (core(5)).
    resource.setrlimit(resource.RLIMIT_CORE, (min(1, hard) if hard >= 0 else 1, hard))


def raise_file_limit() -> None:
    """Raises the limit of open files of this process and its children. The usual soft limit is
    1,024. Each connection is an open file, and libzmq aborts if it has none left to accept one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_log(path: Path) -> int:
    """Returns a descriptor that appends to a file that only this user may read. If the disk is too
    full to create the file, output is discarded. Raises OSError."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return os.open(os.devnull, os.O_WRONLY)


def private_log(path: Path) -> BinaryIO:
    """Returns the file of `open_log`."""
    return os.fdopen(open_log(path), "ab")


def flush_log() -> None:
    """Flushes stderr before `os._exit`. On a full disk, only the rest of the log is lost."""
    with suppress(OSError):
        sys.stderr.flush()


class Heartbeat:
    """Reader of a child's heartbeat. The child gets `fd`, with its number in HEARTBEAT_VARIABLE."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("prism-heartbeat")
        weakref.finalize(self, os.close, self.fd)

    def reset(self) -> None:
        """Clears the counter before the child is started."""
        os.ftruncate(self.fd, 0)

    def count(self) -> int:
        """Returns the number of beats since the child's start. 0: its loop does not run yet."""
        return int.from_bytes(os.pread(self.fd, _COUNT_BYTES, 0), "little")


class LoopWatchdog:
    """Tracks which loops resumed since the last check. Register only loops that never block for
    more than a few seconds, whatever happens outside."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._resumed: set[str] = set()

    def watch(self, loop: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Returns the loop, watched until it ends."""
        name = getattr(loop, "__qualname__", repr(loop))
        self._names.add(name)
        return _WatchedLoop(
            loop, partial(self._resumed.add, name), partial(self._names.discard, name)
        )

    def all_resumed(self) -> bool:
        """Returns True if every loop resumed since the last time this was True."""
        if not self._resumed >= self._names:
            return False
        self._resumed.clear()
        return True

    @property
    def stalled(self) -> list[str]:
        """Names of the loops that have not resumed since `all_resumed` was True."""
        return sorted(self._names - self._resumed)


class _WatchedLoop(Coroutine[Any, Any, T]):
    """Coroutine that calls `resumed` whenever `loop` waits again, and `ended` when it ends."""

    def __init__(
        self,
        loop: Coroutine[Any, Any, T],
        resumed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._loop, self._resumed, self._ended = loop, resumed, ended

    def send(self, value: Any) -> Any:
        return self._resume(self._loop.send, value)

    def throw(self, *error: Any) -> Any:
        return self._resume(self._loop.throw, *error)

    def close(self) -> None:
        self._ended()
        self._loop.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._loop.__await__()

    def _resume(self, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            awaited = step(*arguments)
        except BaseException:  # StopIteration is the loop's return
            self._ended()
            raise
        self._resumed()
        return awaited


class HeartbeatWriter:
    """Writer of a child's heartbeat. Does nothing in a process without a supervisor. One per
    process."""

    def __init__(self) -> None:
        fd = os.environ.pop(HEARTBEAT_VARIABLE, None)
        self.fd = None if fd is None else int(fd)
        self._count = 0

    def beat(self) -> None:
        self._count += 1
        if self.fd is not None:
            os.pwrite(self.fd, self._count.to_bytes(_COUNT_BYTES, "little"), 0)


async def beat(watchdog: LoopWatchdog | None = None) -> None:
    """Writes heartbeats until cancelled, while all loops of `watchdog` resume. Returns at once in a
    process without a supervisor."""
    heartbeat = HeartbeatWriter()
    if heartbeat.fd is None:
        return
    import asyncio  # not at the top: the wrapper of a foreign program does not need it

    silent = 0
    while True:
        if watchdog is None or watchdog.all_resumed():
            silent = 0
            heartbeat.beat()
        elif (silent := silent + 1) == _SILENT_BEATS:
            logging.getLogger("prism").error("event loops stalled: %s", ", ".join(watchdog.stalled))
        await asyncio.sleep(HEARTBEAT_S)


def wrapped_command() -> list[str]:
    """Returns the command line that, put before a foreign program, ends it with this process."""
    return [sys.executable, "-m", "prism.process"]


def main(arguments: list[str]) -> None:
    """Becomes the program `arguments`, which is killed when the present parent ends."""
    if not arguments:
        raise SystemExit("usage: python -m prism.process PROGRAM [ARGUMENT...]")
    die_with_parent()
    os.environ.pop(PARENT_VARIABLE, None)
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
