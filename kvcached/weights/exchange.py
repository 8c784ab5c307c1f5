"""What the store of one machine tells that of another, so that weights go between them.

Machines have the same model at the same path, each on its own disk. A *sketch* says whether the
files are alike without reading them whole; then what one machine knows of them, their hashes, holds
on the other as well, and entries of its store are those that the other one would make.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvcached.errors import WeightFileError
from kvcached.weights.checkpoint import Checkpoint, CheckpointTensor
from kvcached.weights.entry import StoredWeights, WeightKey
from kvcached.weights.hashing import Identity, content_from, identity, keep_hash, known_hash
from kvcached.weights.locks import FileLock
from kvcached.weights.paths import StorePaths
from kvcached.weights.spec import TensorSpec
from kvcached.weights.store import WeightStore

_SAMPLE_BYTES = 4096
_READERS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Sketch:
    """Of a checkpoint: names and sizes of its files, their headers, and the middle of each tensor.

    What another training made differs in nearly every element of a tensor, so it differs here.
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
    """One entry: `blobs` has the hash of each tensor, in the order of `specs`."""

    key: WeightKey
    specs: dict[str, TensorSpec]
    blobs: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.specs.values())


class Exchange:
    """A store's end. Thread rule: any thread."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self._paths = StorePaths.create(store.directory)

    def turn(self, what: str) -> FileLock:
        """For `with`: processes of this machine that would fetch the same wait for one another."""
        name = hashlib.sha256(f"fetch {what}".encode()).hexdigest()[:32]
        return FileLock.take(self._paths.keys / name)

    # --- what both machines know ------------------------------------------------------------

    def known_hashes(self, checkpoint: Checkpoint) -> tuple[str, ...] | None:
        """Of its files, as far as no file has to be read for them: all, or None."""
        known = [known_hash(self._paths, identity(path)) for path in checkpoint.files]
        hashes = tuple(each for each in known if each is not None)
        return hashes if len(hashes) == len(known) else None

    def adopt(self, sketch: Sketch, hashes: Sequence[str]) -> None:
        """Another machine, whose files have the same sketch, knows their hashes. Raises
        WeightFileError for what are no hashes of them."""
        _check_hashes(hashes, len(sketch.identities))
        for of, sha256 in zip(sketch.identities, hashes, strict=True):
            keep_hash(self._paths, of, sha256)

    def content(self, checkpoint: Checkpoint, hashes: Sequence[str]) -> str:
        """What `WeightStore.content_of` says. Raises WeightFileError as `adopt`."""
        _check_hashes(hashes, len(checkpoint.files))
        return content_from(checkpoint, hashes)

    # --- entries ----------------------------------------------------------------------------

    def has(self, key: WeightKey) -> bool:
        """Whether there is such an entry, whole or not."""
        return (self._paths.entries / key.digest).exists()

    def form(self, key: WeightKey) -> StoredForm | None:
        """The entry, which may go again at any time; None if it is not there whole."""
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
        """A part of a tensor, shorter at its end; empty if the store has it not (any more)."""
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
        raise WeightFileError(f"{len(hashes)} hashes, not the SHA-256 of {count} files")
