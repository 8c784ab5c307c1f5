"""File locks that the kernel releases when the process ends for any reason (csrc/liveness.h).

A lock belongs to an open file, so two holders in one process exclude each other as well. A forked
child shares its parent's open files; the locks registered here are closed in the child at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

from kvcached.errors import SystemCallError

_held: WeakSet[FileLock] = WeakSet()


@contextlib.contextmanager
def descriptor_needed(path: Path) -> Iterator[None]:
    """Raises SystemCallError if the process, or the machine, has no descriptor left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise SystemCallError(
            f"cannot open {path}: {error.strerror}; close files, or raise the limit (ulimit -n)"
        ) from error


class FileLock:
    """Open file with a lock on it. Thread rule: one thread at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    @classmethod
    def take(cls, path: Path, *, create: bool = True, shared: bool = False) -> FileLock:
        """Locks the file at `path`, and waits for the lock. Raises FileNotFoundError without
        `create`.

        The file may have been renamed or removed before the lock was granted: see `is_at`.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with descriptor_needed(path):
            lock = cls(os.open(path, flags, 0o600))
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except BaseException:
            lock.release()
            raise
        return lock

    @classmethod
    def try_take(cls, path: Path) -> FileLock | None:
        """Locks the file at `path` exclusively. Returns None if it is missing or locked."""
        try:
            with descriptor_needed(path):
                lock = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        return lock

    @property
    def fd(self) -> int:
        """Descriptor of the open file, -1 once released."""
        return self._fd

    def is_at(self, path: Path) -> bool:
        """Returns whether the locked file is the one at `path`."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._fd)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
