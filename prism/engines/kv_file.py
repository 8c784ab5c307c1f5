"""KV of a request on its way to another engine of the machine.

One file for each request in shared memory: its bytes are copied once out of the source's pages and
once into the target's. Who reads a file removes it; what nobody came for goes after
`ABANDONED_AFTER_S`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

ABANDONED_AFTER_S = 600.0

Rows = NDArray[np.uint8]

log = logging.getLogger("prism.engine")


def save(folder: str, buffers: Iterable[NDArray[Any]]) -> str:
    """Write each layer's K and V, in an order that the reader shares, as arrays of one shape whose
    first axis is tokens. Returns the file's path; "" where there is no room for it."""
    place = Path(folder)
    rows = [_bytes_of(buffer) for buffer in buffers]
    path = place / f"{uuid4().hex}.npy"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(place)
        with path.open("xb") as file:
            np.save(file, np.stack(rows), allow_pickle=False)
    except OSError as error:
        log.warning("KV of a request is not kept for its next engine: %s", error)
        path.unlink(missing_ok=True)
        return ""
    return str(path)


def take(path: str, buffers: int, tokens: int, token_bytes: int) -> Rows | None:
    """Bytes (buffers, tokens, token_bytes) of a file, which is gone then. None, logged, for one
    that is missing, damaged or of another shape."""
    try:
        rows: Rows = np.load(path, mmap_mode="r", allow_pickle=False)
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


def _remove_abandoned(folder: Path) -> None:
    oldest_s = time.time() - ABANDONED_AFTER_S
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest_s:
                path.unlink()
