"""Log files of a running cluster: reading of their ends, and rotation.

Processes have their logs open in append mode, also as stderr, and cannot be asked to reopen them.
So a full log is copied and truncated in place. A line that is written in between is lost.

The folder may be the user's (`--log-dir`), so files with other names, links and devices are
ignored.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

LOG_BYTES_MAX = 32 << 20
OLD_SUFFIX = ".1"
REDIS_LOGS = re.compile(r"redis\.log")


def log_names(parts: Iterable[str], devices: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for the logs of these processes, and of the engines of these devices and
    their ranks."""
    own = [re.escape(part) for part in parts]
    own += [rf"{re.escape(device.replace(':', ''))}-e\d+(\.\d+)?" for device in devices]
    return re.compile(rf"({'|'.join(own)})\.log")


def log_tail(path: Path, lines: int) -> list[str]:
    """Returns the last lines of a log. Empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def rotate_full(folder: Path, names: re.Pattern[str], bytes_max: int = LOG_BYTES_MAX) -> str:
    """Moves each log of more than `bytes_max` to NAME.1, which is replaced. Returns a description
    of failures, or an empty string."""
    problems = []
    for path in _full(folder, names, bytes_max):
        try:
            _rotate(path)
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
    return "; ".join(sorted(problems))


def _full(folder: Path, names: re.Pattern[str], bytes_max: int) -> list[Path]:
    def is_full(entry: os.DirEntry[str]) -> bool:
        ours = names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        return bool(ours) and entry.stat(follow_symlinks=False).st_size > bytes_max

    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if is_full(entry)]
    except OSError:  # it was removed and will be restored
        return []


def _rotate(path: Path) -> None:
    """Rotates a log. Truncates it even if the copy does not fit on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as current:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        old = path.with_name(path.name + OLD_SUFFIX)
        try:
            old.unlink(missing_ok=True)
            _copy(current, old)
        except OSError:
            with suppress(OSError):
                old.unlink()
            raise
        finally:
            os.ftruncate(fd, 0)


def _copy(current: BinaryIO, old: Path) -> None:
    fd = os.open(old, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as copy:
        shutil.copyfileobj(current, copy, 1 << 20)
