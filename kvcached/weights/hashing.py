"""SHA-256 of files on disk, computed once for each state of a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from kvcached.errors import WeightFileError
from kvcached.weights.paths import StorePaths, write_whole

_READ_BYTES = 16 << 20


def identity(path: Path) -> list[str | int]:
    """What changes when a file does."""
    try:
        info = path.stat()
    except OSError as error:
        raise WeightFileError(f"{path}: {error.strerror}") from error
    return [str(path.resolve()), info.st_size, info.st_mtime_ns, info.st_dev, info.st_ino]


def hash_of(paths: StorePaths, path: Path, count: Callable[[int], None]) -> str:
    """As `sha256sum` prints it. `count` is told the bytes that are read from disk."""
    before = identity(path)
    name = hashlib.sha256(str(before[0]).encode()).hexdigest()[:32]
    cached = paths.hashes / f"{name}.json"
    known = _read(cached, before)
    if known is not None:
        return known
    computed = _compute(path, count)
    if identity(path) != before:
        raise WeightFileError(f"{path} changed while it was read; try again when it is whole")
    write_whole(cached, json.dumps({"identity": before, "sha256": computed}).encode())
    return computed


def _read(cached: Path, wanted: list[str | int]) -> str | None:
    try:
        content = json.loads(cached.read_bytes())
        return str(content["sha256"]) if content["identity"] == wanted else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # computed anew


def _compute(path: Path, count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while got := os.readv(fd, [buffer]):
            count(got)
            digest.update(buffer[:got])
    finally:
        os.close(fd)
    return digest.hexdigest()
