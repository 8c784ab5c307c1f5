"""Transfer of a request's KV to another engine through a file in shared memory.

Each request has one file. Its bytes are copied from the source's pages and into the target's, layer
by layer. If the target is on another machine, agents copy the file there. The reader removes the
file. A file that is never read, because its request was cancelled or a process was killed, is
removed after `ABANDONED_AFTER_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import numpy.lib.format as npy
from numpy.typing import NDArray

from kvcached.trust import untrusted_reason

ABANDONED_AFTER_S = 600.0
RESERVE_PART = 0.05
"""Part of a file system below which no KV is saved there."""
_NAME = re.compile(r"[0-9a-f]{32}\.npy")  # names of files that `save` writes

Rows = NDArray[np.uint8]

log = logging.getLogger("prism.engine")


def save(folder: str, buffers: Iterable[NDArray[Any]], count: int) -> str:
    """Writes K and V of each layer to a new file. Returns its path, or "" if the file cannot be
    written or another user has created the folder.

    Args:
        buffers: arrays of one shape whose first axis is tokens, in the order of the reader.
        count: number of buffers.
    """
    path = Path(folder) / f"{uuid4().hex}.npy"
    try:
        with create(path.parent, path.name) as file:
            _check_room(file)
            for index, buffer in enumerate(buffers):
                rows = _bytes_of(buffer)
                if index == 0:
                    header = {"descr": "|u1", "fortran_order": False}
                    npy.write_array_header_1_0(file, {**header, "shape": (count, *rows.shape)})
                file.write(rows.data)
    except OSError as error:
        log.warning("the KV of a request cannot be saved for its next engine: %s", error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return ""
    return str(path)


def _check_room(file: BinaryIO) -> None:
    """Raises OSError if the file system of `file` is almost full: shared memory of other programs
    is there as well."""
    found = os.statvfs(file.fileno())
    if found.f_bavail < RESERVE_PART * found.f_blocks:
        raise OSError(f"less than {RESERVE_PART:.0%} of its file system is free")


def create(folder: Path, name: str) -> BinaryIO:
    """Creates a KV file that only this user can access. Raises OSError, also for an invalid name,
    for a file that exists, and if another user has created the folder."""
    if not _NAME.fullmatch(name):
        raise PermissionError(f"{name!r:.100} is not a valid name of a KV file")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := untrusted_reason(folder):
        raise PermissionError(f"{folder} {why}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(os.open(folder / name, flags, 0o600), "wb")


def take(path: str, buffers: int, tokens: int, token_bytes: int) -> Rows | None:
    """Maps a file and removes it. Returns its bytes, shape (buffers, tokens, token_bytes), which
    stay in the file's pages. Returns None, and logs it, for a file that is missing, damaged or of
    another shape.

    The path came with the request through Redis, so only files with a valid name are read and
    removed.
    """
    if not _NAME.fullmatch(Path(path).name):
        log.warning("KV of a request is computed again: %.200r is not a KV file", path)
        return None
    try:
        rows: Rows = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        log.warning("KV of a request is computed again: %s", error)
        return None
    finally:
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)
    if rows.dtype != np.uint8 or rows.shape != (buffers, tokens, token_bytes):
        log.warning("KV of a request is computed again: %s has shape %s", path, rows.shape)
        return None
    return rows


def _bytes_of(buffer: NDArray[Any]) -> Rows:
    return np.ascontiguousarray(buffer).reshape(len(buffer), -1).view(np.uint8)


def remove_abandoned(folder: Path) -> None:
    """Removes files that were never read."""
    oldest_s = time.time() - ABANDONED_AFTER_S
    for path in folder.glob("*.npy"):
        with contextlib.suppress(OSError):  # already removed, or another user's
            if path.stat().st_mtime < oldest_s:
                log.info("removing %s, which was not read", path)
                path.unlink()
