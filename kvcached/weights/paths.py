"""Files of a store.

    version                  the format; any other is refused
    mutex                    locked while tensors are linked, or entries added or removed
    blobs/HASH               the bytes of a tensor, once, by their SHA-256
    entries/DIGEST/          a whole set of tensors: manifest.json, and in t/ a hard link to each
                             blob; its users share a lock on the manifest
    partial/ID/              an entry that is being made, its maker holding `lock`, or one that is
                             being removed; unlocked folders here are removed
    keys/DIGEST              locked by the one process that makes an entry, while others wait
    hashes/DIGEST.json       the hash of a file on disk, valid while its name, size and times match

A blob's link count is its reference count: 1 more than the entries that have it. The kernel keeps
it, so no process's death can make it wrong. An entry appears by one rename and is whole from then
on.
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
    """Paths of a store's files; see the module."""

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
        """Creates missing folders.

        Raises InvalidArgumentError if `root` is not a store, or if another user could modify it,
        since its files are served as the model.
        """
        paths = cls(root.resolve())
        try:
            paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if reason := untrusted_reason(paths.root):
                raise InvalidArgumentError(f"{root} {reason}; name another directory")
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
                    f"{self.root} contains other files, such as {foreign[0]}; name an empty folder"
                )
            version.write_text(FORMAT)
        if version.read_text() != FORMAT:
            raise WeightFileError(
                f"{self.root} is a store of another version; remove it, or name another directory"
            )

    def new_partial(self) -> Path:
        """Returns a fresh path in `partial`."""
        return self.partial / uuid4().hex


def remove_tree(folder: Path) -> None:
    """Removes a partial folder.

    `lock` is removed last, so that the folder never looks abandoned before.
    """
    for path in [*(folder / "t").glob("*"), *folder.glob("*")]:
        if path.name not in ("t", LOCK):
            path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (folder / "t").rmdir()
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that other processes never see half written."""
    part = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
