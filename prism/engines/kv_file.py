"""KV of a request on its way to another engine.

Each request has one file in shared memory. Its bytes are copied out of the source's pages and into
the target's, layer by layer; where the target is on another machine, agents copy the file there.
The reader removes the file. A file that is never read, because the request was cancelled on its way
or a process was killed, is removed after `ABANDONED_AFTER_S`.
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

from kvcached.trust import distrust

ABANDONED_AFTER_S = 600.0
_NAME = re.compile(r"[0-9a-f]{32}\.npy")  # of a file that `save` wrote

Rows = NDArray[np.uint8]

log = logging.getLogger("prism.engine")


def save(folder: str, buffers: Iterable[NDArray[Any]], count: int) -> str:
    """Write each layer's K and V, `count` in all, in an order that the reader shares, as arrays of
    one shape whose first axis is tokens. Returns the file's path; "" where there is no room for
    it, or where another user has made the folder first."""
    path = Path(folder) / f"{uuid4().hex}.npy"
    try:
        with create(path.parent, path.name) as file:
            for index, buffer in enumerate(buffers):
                rows = _bytes_of(buffer)
                if index == 0:
                    header = {"descr": "|u1", "fortran_order": False}
                    npy.write_array_header_1_0(file, {**header, "shape": (count, *rows.shape)})
                file.write(rows.data)
    except OSError as error:
        log.warning("KV of a request is not kept for its next engine: %s", error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return ""
    return str(path)


def create(folder: Path, name: str) -> BinaryIO:
    """A new file of KV, for this user alone. Raises OSError, also for a name that none has, for one
    that is there, and where another user has made the folder first."""
    if not _NAME.fullmatch(name):
        raise PermissionError(f"{name!r:.100} is no file of KV")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := distrust(folder):
        raise PermissionError(f"{folder} {why}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(os.open(folder / name, flags, 0o600), "wb")


def take(path: str, buffers: int, tokens: int, token_bytes: int) -> Rows | None:
    """Bytes (buffers, tokens, token_bytes) of a file, which is gone then; they lie in its pages
    until they are dropped. None, logged, for one that is missing, damaged or of another shape.

    The path came with the request, by way of Redis: no other file is read or removed.
    """
    if not _NAME.fullmatch(Path(path).name):
        log.warning("KV of a request is computed again: %.200r is no file of KV", path)
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
        log.warning("KV of a request is computed again: %s holds %s", path, rows.shape)
        return None
    return rows


def _bytes_of(buffer: NDArray[Any]) -> Rows:
    return np.ascontiguousarray(buffer).reshape(len(buffer), -1).view(np.uint8)


def remove_abandoned(folder: Path) -> None:
    """Removes files that were never read."""
    oldest_s = time.time() - ABANDONED_AFTER_S
    for path in folder.glob("*.npy"):
        with contextlib.suppress(OSError):  # it was read, or is another user's
            if path.stat().st_mtime < oldest_s:
                log.info("%s is removed: it was not read", path)
                path.unlink()
