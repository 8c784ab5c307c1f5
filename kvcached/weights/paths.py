"""The files of a store.

    version                  the format; another one is refused
    mutex                    locked while tensors are linked, entries appear or go
    blobs/HASH               the bytes of a tensor, once, by their SHA-256
    entries/DIGEST/          a whole set of tensors: manifest.json, and in t/ a hard link to each
                             blob; its users share a lock on the manifest
    partial/ID/              one that is being made, its maker holding `lock`; an entry on its way
                             out as well. What is not locked here is removed
    keys/DIGEST              locked by the one process that makes an entry, so that others wait
    hashes/DIGEST.json       the hash of a file on disk, as long as its name, size and times agree

A blob's link count is its reference count: 1 more than the entries that have it. The kernel keeps
it, so no death can make it wrong. An entry appears by one rename and is whole from then on.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from kvcached.errors import InvalidArgumentError, WeightFileError
from kvcached.trust import untrusted_reason
from kvcached.weights.locks import FileLock

FORMAT = "prism-weights 1\n"
MANIFEST = "manifest.json"
LOCK = "lock"


class StorePaths:
    """Names of a store's files; see the module."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mutex = root / "mutex"
        self.blobs = root / "blobs"
        self.entries = root / "entries"
        self.partial = root / "partial"
        self.keys = root / "keys"
        self.hashes = root / "hashes"

    @classmethod
    def create(cls, root: Path) -> StorePaths:
        """Makes what is missing. Raises InvalidArgumentError if `root` is something else, or if
        another user could change it: what lies there is served as the model."""
        paths = cls(root.resolve())
        try:
            paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := untrusted_reason(paths.root):
                raise InvalidArgumentError(f"{root} {why}; name another directory")
            with FileLock.take(paths.mutex):
                paths._check_format()
                for folder in (paths.blobs, paths.entries, paths.partial, paths.keys, paths.hashes):
                    folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidArgumentError(
                f"{root} cannot hold a weight store: {error.strerror}; name another directory"
            ) from error
        return paths

    def _check_format(self) -> None:
        version = self.root / "version"
        if not version.exists():
            foreign = [path.name for path in self.root.iterdir() if path != self.mutex]
            if foreign:
                self.mutex.unlink()
                raise InvalidArgumentError(
                    f"{self.root} has other files in it, such as {foreign[0]}; name an empty one"
                )
            version.write_text(FORMAT)
        if version.read_text() != FORMAT:
            raise WeightFileError(
                f"{self.root} is a store of another version; remove it, or name another directory"
            )

    def new_partial(self) -> Path:
        """A fresh name in `partial`."""
        return self.partial / uuid4().hex


def remove_tree(folder: Path) -> None:
    """Removes a partial folder: `lock` last, so that it never looks abandoned before."""
    for path in [*(folder / "t").glob("*"), *folder.glob("*")]:
        if path.name not in ("t", LOCK):
            path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (folder / "t").rmdir()
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file there that is never seen half written."""
    part = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
