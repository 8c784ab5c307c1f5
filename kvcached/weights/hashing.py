"""SHA-256 of files on disk, computed once for each state of a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcached.errors import WeightFileError
from kvcached.weights.checkpoint import Checkpoint
from kvcached.weights.paths import StorePaths, write_whole

_READ_BYTES = 16 << 20
Identity = list[str | int]


def identity(path: Path) -> Identity:
    """Returns values that change when the file does."""
    try:
        info = path.stat()
    except OSError as error:
        raise WeightFileError(f"{path}: {error.strerror}") from error
    return [str(path.resolve()), info.st_size, info.st_mtime_ns, info.st_dev, info.st_ino]


def content_from(checkpoint: Checkpoint, hashes: Sequence[str]) -> str:
    """Returns the checkpoint's hash, computed from the hashes of its files."""
    named = zip(checkpoint.files, hashes, strict=True)
    lines = "".join(f"{path.name} {sha256}\n" for path, sha256 in named)
    return hashlib.sha256(lines.encode()).hexdigest()


def hash_of(paths: StorePaths, path: Path, count: Callable[[int], None]) -> str:
    """Returns the hash as `sha256sum` prints it. `count` receives the bytes read from disk."""
    before = identity(path)
    known = known_hash(paths, before)
    if known is not None:
        return known
    computed = _compute(path, count)
    if identity(path) != before:
        raise WeightFileError(f"{path} changed while it was read; try again once it is complete")
    keep_hash(paths, before, computed)
    return computed


def keep_hash(paths: StorePaths, of: Identity, sha256: str) -> None:
    """Stores the hash of a file, valid while the file is unchanged."""
    write_whole(_kept(paths, of), json.dumps({"identity": of, "sha256": sha256}).encode())


def known_hash(paths: StorePaths, wanted: Identity) -> str | None:
    """Returns the stored hash, or None if the file would have to be read."""
    try:
        content = json.loads(_kept(paths, wanted).read_bytes())
        return str(content["sha256"]) if content["identity"] == wanted else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # computed anew


def _kept(paths: StorePaths, of: Identity) -> Path:
    return paths.hashes / f"{hashlib.sha256(str(of[0]).encode()).hexdigest()[:32]}.json"


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
