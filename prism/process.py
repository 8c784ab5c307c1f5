"""Child processes that never outlive their parent.

A parent starts a child with `child_environment()`; the child calls `die_with_parent()` first
thing in its main. A foreign program is started as `[*wrapped_command(), "program", ...]`: the
wrapper asks for the signal and then becomes the program. Linux only (PR_SET_PDEATHSIG).

The kernel sends the signal when the *thread* that started the child ends: start children from a
thread that lives as long as the process.

A child's event loop shows that it turns: it counts in a memfd that the child inherits, which needs
no file system and no clock. A thread would go on beating beside a loop that hangs. Nor does a child
beat while one of the loops hangs that it has named (`Turns`).
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
_SILENT_BEATS = 25  # missed before the log says which loops stand still
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_COUNT_BYTES = 8
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def child_environment() -> dict[str, str]:
    """This process's environment plus its pid, by which the child notices a dead parent."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def die_with_parent(parent_pid: int | None = None, sig: int = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process once its parent is gone.

    parent_pid: who must still be the parent now; by default the pid in the environment, and
    without one (started by hand) nothing is asked for. Call it again after a fork: the request
    is not inherited. Raises OSError when the kernel refuses.
    """
    named = os.environ.get(PARENT_VARIABLE)
    expected = parent_pid if parent_pid is not None else int(named) if named else None
    if expected is None:
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != expected:
        os.kill(os.getpid(), sig)


def show_as(name: str) -> None:
    """The name by which `ps` and `top` show this process, whose command line is its parent's. At
    most 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def configure_logging(
    text: str = "%(asctime)s %(levelname)s %(name)s: %(message)s",
) -> None:
    """Log to stderr at the level that the launcher's --log-level put into the environment,
    replacing what was configured before."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").upper()
    logging.basicConfig(level=level, format=text, force=True)


def keep_private(*, core_dumps: bool = False) -> None:
    """For this process and its children: no other user may open the files that they make, and none
    leaves a core file, which would hold prompts."""
    os.umask(0o077)
    if core_dumps:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # Not 0, which is no bound where the kernel pipes cores into a program; 1 is one (core(5)).
    resource.setrlimit(resource.RLIMIT_CORE, (min(1, hard) if hard >= 0 else 1, hard))


def raise_file_limit() -> None:
    """For this process and its children. The usual soft limit is 1,024; each connection is an open
    file, and libzmq aborts where it has none left for who connects."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_log(path: Path) -> int:
    """A descriptor of a file to append to that this user alone may read. Where the disk has no room
    for one more file, what is written goes nowhere. Raises OSError."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return os.open(os.devnull, os.O_WRONLY)


def private_log(path: Path) -> BinaryIO:
    """`open_log` as a file."""
    return os.fdopen(open_log(path), "ab")


def flush_log() -> None:
    """Before `os._exit`. On a full disk the rest of the log is lost, and nothing else."""
    with suppress(OSError):
        sys.stderr.flush()


class Heartbeat:
    """The supervisor's end. A child gets `fd`, and its number in HEARTBEAT_VARIABLE."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("prism-heartbeat")
        weakref.finalize(self, os.close, self.fd)

    def reset(self) -> None:
        """Before the child is started."""
        os.ftruncate(self.fd, 0)

    def count(self) -> int:
        """Beats since the child's start; 0: its loop does not run yet."""
        return int.from_bytes(os.pread(self.fd, _COUNT_BYTES, 0), "little")


class Turns:
    """Which of a process's loops have gone on after a wait. Only those belong here that never wait
    for longer than a few seconds, whatever comes or does not come from outside."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._turned: set[str] = set()

    def of(self, loop: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """The same loop, watched until it ends."""
        name = getattr(loop, "__qualname__", repr(loop))
        self._names.add(name)
        return _Watched(loop, partial(self._turned.add, name), partial(self._names.discard, name))

    def all_turned(self) -> bool:
        """Each of them, since this was true the last time."""
        if not self._turned >= self._names:
            return False
        self._turned.clear()
        return True

    @property
    def standing_still(self) -> list[str]:
        return sorted(self._names - self._turned)


class _Watched(Coroutine[Any, Any, T]):
    """`loop`, with a call of `turned` whenever it waits again, and one of `ended`."""

    def __init__(
        self,
        loop: Coroutine[Any, Any, T],
        turned: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._loop, self._turned, self._ended = loop, turned, ended

    def send(self, value: Any) -> Any:
        return self._go_on(self._loop.send, value)

    def throw(self, *error: Any) -> Any:
        return self._go_on(self._loop.throw, *error)

    def close(self) -> None:
        self._ended()
        self._loop.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._loop.__await__()

    def _go_on(self, how: Callable[..., Any], *given: Any) -> Any:
        try:
            awaited = how(*given)
        except BaseException:  # StopIteration is the loop's return
            self._ended()
            raise
        self._turned()
        return awaited


class Pulse:
    """A child's end of its supervisor's `Heartbeat`; in a process that nobody watches it does
    nothing. One for each process."""

    def __init__(self) -> None:
        named = os.environ.pop(HEARTBEAT_VARIABLE, None)
        self.fd = None if named is None else int(named)
        self._count = 0

    def beat(self) -> None:
        self._count += 1
        if self.fd is not None:
            os.pwrite(self.fd, self._count.to_bytes(_COUNT_BYTES, "little"), 0)


async def beat(turns: Turns | None = None) -> None:
    """Beat until cancelled, as long as all of `turns` go on. Returns at once in a process that
    nobody watches."""
    pulse = Pulse()
    if pulse.fd is None:
        return
    import asyncio  # not above: the wrapper of a foreign program needs none

    silent = 0
    while True:
        if turns is None or turns.all_turned():
            silent = 0
            pulse.beat()
        elif (silent := silent + 1) == _SILENT_BEATS:
            logging.getLogger("prism").error("stand still: %s", ", ".join(turns.standing_still))
        await asyncio.sleep(HEARTBEAT_S)


def wrapped_command() -> list[str]:
    """The command line in front of a foreign program that shall die with this process."""
    return [sys.executable, "-m", "prism.process"]


def main(arguments: list[str]) -> None:
    """Become the program `arguments`, to be killed when the present parent dies."""
    if not arguments:
        raise SystemExit("usage: python -m prism.process PROGRAM [ARGUMENT...]")
    die_with_parent()
    os.environ.pop(PARENT_VARIABLE, None)
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
