"""Data that the stores of two machines exchange, so that weights move between them.

Machines have the same model at the same path, each on its own disk. A *sketch* shows whether the
files are equal without reading all of them. If so, the hashes that one machine has computed hold on
the other as well, and so do the entries of its store.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvcached.errors import WeightFileError
from kvcached.weights.checkpoint import Checkpoint
from kvcached.weights.entry import StoredWeights, WeightKey
from kvcached.weights.hashing import Identity, content_from, identity, keep_hash, known_hash
from kvcached.weights.locks import FileLock
from kvcached.weights.paths import StorePaths
from kvcached.weights.spec import CheckpointTensor, TensorSpec
from kvcached.weights.store import WeightStore

_SAMPLE_BYTES = 4096
_READERS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Sketch:
    """Hash of a checkpoint's file names and sizes, headers, and the middle of each tensor.

    Another training run changes nearly every element of a tensor, and so the sketch.
    """

    checkpoint: Checkpoint
    identities: tuple[Identity, ...]
    sha256: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Sketch:
        """Reads a page of each tensor. Raises WeightFileError."""
        identities = tuple(identity(path) for path in checkpoint.files)
        digest = hashlib.sha256()
        for path, found in zip(checkpoint.files, identities, strict=True):
            digest.update(f"{path.name} {found[1]}\n".encode())
        with ThreadPoolExecutor(_READERS) as pool:
            for line in pool.map(_sample, checkpoint.tensors.values()):
                digest.update(line)
        return cls(checkpoint, identities, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One entry. `blobs` has the hash of each tensor, in the order of `specs`."""

    key: WeightKey
    specs: dict[str, TensorSpec]
    blobs: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.specs.values())


class Exchange:
    """One store's end of an exchange. Thread rule: any thread."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self._paths = StorePaths.create(store.directory)

    def fetch_lock(self, what: str) -> FileLock:
        """Returns a lock, for `with`: one process of this machine at a time fetches `what`."""
        name = hashlib.sha256(f"fetch {what}".encode()).hexdigest()[:32]
        return FileLock.take(self._paths.keys / name)

    # --- what both machines know ------------------------------------------------------------

    def known_hashes(self, checkpoint: Checkpoint) -> tuple[str, ...] | None:
        """Returns the hashes of the checkpoint's files, or None if a file would have to be read."""
        known = [known_hash(self._paths, identity(path)) for path in checkpoint.files]
        hashes = tuple(each for each in known if each is not None)
        return hashes if len(hashes) == len(known) else None

    def adopt(self, sketch: Sketch, hashes: Sequence[str]) -> None:
        """Stores the hashes that another machine has computed for files with the same sketch.

        Raises WeightFileError if they are not valid hashes of these files.
        """
        _check_hashes(hashes, len(sketch.identities))
        for of, sha256 in zip(sketch.identities, hashes, strict=True):
            keep_hash(self._paths, of, sha256)

    def content(self, checkpoint: Checkpoint, hashes: Sequence[str]) -> str:
        """Returns the result of `WeightStore.content_of`. Raises as `adopt` does."""
        _check_hashes(hashes, len(checkpoint.files))
        return content_from(checkpoint, hashes)

    # --- entries ----------------------------------------------------------------------------

    def has(self, key: WeightKey) -> bool:
        """Returns whether there is such an entry, whole or damaged."""
        return (self._paths.entries / key.digest).exists()

    def form(self, key: WeightKey) -> StoredForm | None:
        """Returns the entry, or None if it is missing or damaged. It may be evicted at any time."""
        try:
            found = StoredWeights.open(self._paths.entries / key.digest)
        except WeightFileError:
            return None
        if found is None:
            return None
        with found, os.scandir(self._paths.blobs) as listed:
            names = {blob.inode(): blob.name for blob in listed}
            blobs = [names.get(found.path(name).stat().st_ino, "") for name in found.specs]
        return StoredForm(found.key, dict(found.specs), tuple(blobs)) if all(blobs) else None

    def read(self, blob: str, offset_bytes: int, size_bytes: int) -> bytes:
        """Returns a part of a tensor, shorter at the tensor's end. Empty if the store does not have
        it.
        """
        if not _SHA256.fullmatch(blob):
            return b""
        try:
            fd = os.open(self._paths.blobs / blob, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return b""
        try:
            return os.pread(fd, size_bytes, offset_bytes)
        finally:
            os.close(fd)


def _sample(tensor: CheckpointTensor) -> bytes:
    size_bytes = tensor.spec.size_bytes
    length = min(_SAMPLE_BYTES, size_bytes)
    fd = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        middle = os.pread(fd, length, tensor.offset_bytes + (size_bytes - length) // 2)
    finally:
        os.close(fd)
    line = f"{tensor.name} {tensor.spec} {tensor.path.name} {tensor.offset_bytes}\n"
    return line.encode() + middle


def _check_hashes(hashes: Sequence[str], count: int) -> None:
    if len(hashes) != count or not all(_SHA256.fullmatch(each) for each in hashes):
        raise WeightFileError(f"the {len(hashes)} hashes are not the SHA-256 of {count} files")
