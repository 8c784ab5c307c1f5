"""Weights of models in host memory, once per machine and shared by all its processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kvcached import checks
from kvcached.checks import (
    by_name,
    checked,
    function,
    instance_of,
    namespace_name,
    optional,
    positive,
    text,
)
from kvcached.errors import LoadCancelledError, WeightFileError
from kvcached.weights.builder import Produce, WeightBuilder
from kvcached.weights.checkpoint import Checkpoint
from kvcached.weights.entry import StoredWeights, WeightKey, checkpoint_key
from kvcached.weights.hashing import content_from, hash_of, identity
from kvcached.weights.locks import FileLock
from kvcached.weights.paths import StorePaths
from kvcached.weights.prefetch import Prefetch
from kvcached.weights.space import StoreSpace
from kvcached.weights.spec import CheckpointTensor, TensorSpec

_READ_BYTES = 8 << 20


def default_store(namespace: str) -> Path:
    """Returns the directory of a namespace's store, unless one is named."""
    return Path(f"/dev/shm/prism-weights.{namespace}")


_key = instance_of(WeightKey)
_specs = by_name(instance_of(TensorSpec))


def _model(name: str, value: str | Path | Checkpoint) -> Path | Checkpoint:
    return value if isinstance(value, Checkpoint) else checks.path(name, value)


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """Totals of one WeightStore object since it was opened."""

    disk_bytes: int = 0  # read from checkpoints, to hash them or to store their tensors
    """Read from checkpoints, to hash them or to store their tensors."""
    stored_bytes: int = 0  # put into the store
    """Put into the store."""
    shared_bytes: int = 0  # of those, what it had already: tensors of another model of one base
    """Part of `stored_bytes` that the store already had: tensors of a model with the same base."""
    made_entries: int = 0
    found_entries: int = 0


class WeightStore:
    """Tensors in the form that an engine needs, so that an activation is a copy (Prism §5.2).

    All processes that open one directory share it. Its size is limited: the least recently used
    entries are evicted first, but never one that a process has open. A process may die at any
    moment: its entries are then not in use, and an entry that it was making is removed. Thread
    rule: any thread.
    """

    def __init__(self, paths: StorePaths, max_bytes: int, threads: int) -> None:
        self._paths = paths
        self._space = StoreSpace(paths, max_bytes)
        self._threads = threads
        self._counters = StoreCounters()
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"WeightStore({str(self.directory)!r}, max_bytes={self.max_bytes})"

    @classmethod
    @checked(
        directory=checks.path, max_bytes=positive, namespace=namespace_name, threads=checks.threads
    )
    def open(
        cls,
        directory: str | Path | None = None,
        *,
        max_bytes: int | None = None,
        namespace: str = "default",
        threads: int = 4,
    ) -> WeightStore:
        """Creates the store, or opens an existing one.

        `directory` defaults to one of `namespace` in /dev/shm. For huge pages name one on a tmpfs
        mounted with huge=within_size; for weights that outlive a reboot, one on a disk. `max_bytes`
        defaults to 80 % of its file system. `threads` read and hash files.
        """
        root = Path(directory) if directory else default_store(namespace)
        paths = StorePaths.create(root)
        if max_bytes is None:
            system = os.statvfs(paths.root)
            max_bytes = system.f_blocks * system.f_frsize * 8 // 10
        store = cls(paths, max_bytes, threads)
        with FileLock.take(paths.mutex):
            store._space.clean()
        return store

    @property
    def directory(self) -> Path:
        """Folder of the store's files."""
        return self._paths.root

    @property
    def max_bytes(self) -> int:
        """Limit that this object keeps."""
        return self._space.max_bytes

    def used_bytes(self) -> int:
        """Returns the bytes of its tensors, each counted once, and of entries being made."""
        with FileLock.take(self._paths.mutex):
            return self._space.used_bytes()

    def counters(self) -> StoreCounters:
        """Returns the totals of this object."""
        with self._mutex:
            return self._counters

    # --- entries ---------------------------------------------------------------------------

    @checked(key=_key)
    def find(self, key: WeightKey) -> StoredWeights | None:
        """Opens an entry. Returns None if it does not exist.

        Raises WeightFileError if one of its files is missing or was cut: `discard` it.
        """
        found = StoredWeights.open(self._entry(key))
        if found is not None:
            self._count(found_entries=1)
        return found

    @checked(key=_key, produce=function)
    def get(self, key: WeightKey, produce: Produce) -> StoredWeights:
        """Opens an entry. If it does not exist, `produce` puts its tensors.

        One process makes an entry while others wait for it; if it dies, the next one does. A
        damaged entry that is not in use is made again. If `produce` raises, nothing is stored.
        """
        found = self._find_whole(key)
        if found is not None:
            return found
        with FileLock.take(self._paths.keys / key.digest):
            return self._find_whole(key) or self._make(key, produce)

    @checked(key=_key)
    def discard(self, key: WeightKey) -> bool:
        """Removes an entry. Returns False if it does not exist or is in use."""
        with FileLock.take(self._paths.mutex):
            entry = self._entry(key)
            return entry.exists() and self._space.evict(entry)

    def _entry(self, key: WeightKey) -> Path:
        return self._paths.entries / key.digest

    def _find_whole(self, key: WeightKey) -> StoredWeights | None:
        try:
            return self.find(key)
        except WeightFileError:
            if not self.discard(key):
                raise
            return None

    def _make(self, key: WeightKey, produce: Produce) -> StoredWeights:
        builder = WeightBuilder(self._paths, self._space, key)
        try:
            produce(builder)
            made = builder.seal()
        finally:
            builder.abandon()
        self._count(stored_bytes=made.size_bytes, shared_bytes=builder.shared_bytes, made_entries=1)
        return made

    # --- checkpoints -----------------------------------------------------------------------

    @checked(checkpoint=instance_of(Checkpoint))
    def content_of(self, checkpoint: Checkpoint) -> str:
        """Returns the checkpoint's hash, which is `WeightKey.content`.

        Files are read once; the hash is kept while their size, times and inode match.
        """
        with ThreadPoolExecutor(self._threads) as pool:
            hashes = list(pool.map(self._hash_of, checkpoint.files))
        return content_from(checkpoint, hashes)

    @checked(model=_model, expected=_specs, cancel=instance_of(threading.Event))
    def get_checkpoint(
        self,
        model: str | Path | Checkpoint,
        *,
        expected: Mapping[str, TensorSpec] | None = None,
        cancel: threading.Event | None = None,
    ) -> StoredWeights:
        """Opens a checkpoint's own tensors, as its files have them, read by parallel chunks.

        Raises WeightFileError with the file that is missing, short or damaged, WeightMismatchError
        if the tensors are not `expected`, LoadCancelledError once `cancel` is set, StoreFullError.
        """
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
        key = checkpoint_key(self.content_of(checkpoint))

        def produce(builder: WeightBuilder) -> None:
            before = [identity(path) for path in checkpoint.files]
            self._read_tensors(checkpoint, builder, cancel or threading.Event())
            if [identity(path) for path in checkpoint.files] != before:
                raise WeightFileError(f"{checkpoint.files[0].parent} changed while it was read")

        weights = self.get(key, produce)
        if expected is not None:
            try:
                weights.expect(expected)
            except BaseException:
                weights.close()
                raise
        return weights

    @checked(content=text)
    def find_checkpoint(self, content: str) -> StoredWeights | None:
        """Opens a checkpoint's own tensors if a process has read them. Returns None otherwise.

        Waits for a process that is reading them now. Raises as `find` does.
        """
        key = checkpoint_key(content)
        with FileLock.take(self._paths.keys / key.digest):
            return self.find(key)

    @checked(model=_model, unless=optional(function), first=optional(function))
    def prefetch(
        self,
        model: str | Path | Checkpoint,
        *,
        unless: Callable[[str], WeightKey] | None = None,
        first: Callable[[threading.Event], object] | None = None,
    ) -> Prefetch:
        """Starts `get_checkpoint` in the background, on a hint that the model will be needed.

        `unless` returns the key of the engine's own form of a model, given its content. If the
        store has that entry, it counts as used now, its files are loaded from the store's disk, and
        nothing else is read. `first` is called before anything is read, with the event that
        `cancel` sets; it may fill the store.
        """

        def read(cancel: threading.Event) -> None:
            if first is not None:
                first(cancel)
            checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
            key = unless(self.content_of(checkpoint)) if unless else None
            found = self._find_whole(key) if key else None
            if found is None:
                self.get_checkpoint(checkpoint, cancel=cancel).close()
                return
            with found:
                found.will_need()

        return Prefetch(read)

    def _hash_of(self, path: Path) -> str:
        return hash_of(self._paths, path, lambda read_bytes: self._count(disk_bytes=read_bytes))

    def _read_tensors(
        self, checkpoint: Checkpoint, builder: WeightBuilder, cancel: threading.Event
    ) -> None:
        def store(tensor: CheckpointTensor) -> None:
            builder.put_bytes(tensor.name, tensor.spec, self._chunks(tensor, cancel))

        with ThreadPoolExecutor(self._threads) as pool:
            try:
                list(pool.map(store, checkpoint.tensors.values()))
            except BaseException:
                cancel.set()  # stops the other threads
                raise

    def _chunks(self, tensor: CheckpointTensor, cancel: threading.Event) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_READ_BYTES, tensor.spec.size_bytes)))
        end = tensor.offset_bytes + tensor.spec.size_bytes
        fd = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(tensor.offset_bytes, end, _READ_BYTES):
                if cancel.is_set():
                    raise LoadCancelledError(f"reading {tensor.path} was cancelled")
                chunk = buffer[: min(_READ_BYTES, end - at)]
                self._read_exactly(fd, tensor.path, chunk, at)
                yield chunk
        finally:
            os.close(fd)

    def _read_exactly(self, fd: int, path: Path, target: memoryview, at: int) -> None:
        while target:
            got = os.preadv(fd, [target], at)
            if got == 0:
                raise WeightFileError(f"{path} ends at byte {at}; it was truncated during the read")
            self._count(disk_bytes=got)
            target, at = target[got:], at + got

    def _count(self, **more: int) -> None:
        with self._mutex:
            now = self._counters
            self._counters = replace(
                now, **{name: getattr(now, name) + value for name, value in more.items()}
            )
