"""Builder of one entry of the store: tensors are put one by one, then it is sealed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from kvcached.checks import checked, has, instance_of, optional, text
from kvcached.errors import ClosedError, InvalidArgumentError, StoreFullError, WeightFileError
from kvcached.weights.entry import StoredWeights, WeightKey, manifest_of
from kvcached.weights.locks import FileLock
from kvcached.weights.paths import LOCK, MANIFEST, StorePaths, remove_tree, write_whole
from kvcached.weights.space import StoreSpace
from kvcached.weights.spec import DTYPE_BYTES, TensorSpec
from kvcached.weights.tensor_reader import TensorContent, TensorReader

_GRANT_BYTES = 256 << 20  # step of reservations, each of which counts the store's blobs
_PAGE_BYTES = 4096  # smallest size of a file

# DLPack's (type code, bits); float8 came with version 1.1.
_NAMES = {(0, 8 * size): f"int{8 * size}" for size in (1, 2, 4, 8)}
_NAMES |= {(1, 8 * size): f"uint{8 * size}" for size in (1, 2, 4, 8)}
_NAMES |= {(2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16"}
_NAMES |= {(6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}


class WeightBuilder:
    """Builder that the producer of `WeightStore.get` receives. Thread rule: any thread puts."""

    def __init__(self, paths: StorePaths, space: StoreSpace, key: WeightKey) -> None:
        self.key = key
        self.shared_bytes = 0  # of tensors that the store already had
        self._paths, self._space = paths, space
        self._folder = paths.new_partial()
        self._specs: dict[str, TensorSpec] = {}
        self._files: dict[str, Path] = {}
        self._numbers = count()
        self._granted_bytes = 0
        self._mutex = threading.Lock()
        self._reader = TensorReader()
        with FileLock.take(paths.mutex):
            (self._folder / "t").mkdir(parents=True)
            self._lock = FileLock.take(self._folder / LOCK)

    @checked(name=text, dtype=text)
    def put(self, name: str, array: Any, *, dtype: str | None = None) -> None:
        """Stores a copy of a contiguous tensor: numpy, torch or any DLPack source, on a CPU or CUDA
        device.

        A tensor on a GPU is read through pinned memory, after the work on its owner's current
        stream (`TensorReader`); nothing else is waited for. `dtype` names a type that the source
        cannot name (bytes of a packed type, for example); the element size stays. Raises
        StoreFullError, InvalidArgumentError, SystemCallError if the driver refuses the copy.
        """
        with self._reader.open(array, f"tensor {name}") as content:
            self.put_bytes(name, _spec_of(name, content, dtype), content.pieces)

    @checked(name=text, spec=instance_of(TensorSpec), chunks=has("__iter__"), sha256=optional(text))
    def put_bytes(
        self,
        name: str,
        spec: TensorSpec,
        chunks: Iterable[memoryview | bytes],
        *,
        sha256: str | None = None,
    ) -> None:
        """Stores a tensor from pieces of its bytes, in order.

        Raises WeightFileError if their hash is not `sha256`.
        """
        path = self._add(name, spec)
        try:
            self._store(name, spec, path, chunks, sha256)
        except BaseException:
            with self._mutex:
                del self._specs[name], self._files[name]
            path.unlink(missing_ok=True)
            raise

    def _store(
        self,
        name: str,
        spec: TensorSpec,
        path: Path,
        chunks: Iterable[memoryview | bytes],
        sha256: str | None,
    ) -> None:
        try:
            content = _write(name, path, chunks)
        except OSError as error:
            raise StoreFullError(f"{path}: {error.strerror}", spec.size_bytes, 0) from error
        if path.stat().st_size != spec.size_bytes:
            raise InvalidArgumentError(
                f"tensor {name} is {spec} and takes {spec.size_bytes} bytes, not "
                f"{path.stat().st_size}"
            )
        if sha256 is not None and content != sha256:
            raise WeightFileError(f"tensor {name} is damaged: its hash is {content}, not {sha256}")
        with FileLock.take(self._paths.mutex):
            self._link(path, spec.size_bytes, content)

    def _add(self, name: str, spec: TensorSpec) -> Path:
        with self._mutex:
            if self._lock.fd < 0:
                raise ClosedError("the entry was sealed or abandoned")
            if name in self._specs:
                raise InvalidArgumentError(f"tensor {name} was already put")
            self._reserve(-(-spec.size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
            self._specs[name] = spec
            self._files[name] = self._folder / "t" / str(next(self._numbers))
            return self._files[name]

    def _reserve(self, size_bytes: int) -> None:
        if self._granted_bytes < size_bytes:
            with FileLock.take(self._paths.mutex):
                self._granted_bytes += self._grant(size_bytes - self._granted_bytes)
        self._granted_bytes -= size_bytes

    def _grant(self, need_bytes: int) -> int:
        ample_bytes = max(need_bytes, min(_GRANT_BYTES, self._space.max_bytes // 16))
        try:
            self._space.reserve(self._folder, ample_bytes, may_evict=False)
            return ample_bytes
        except StoreFullError:
            self._space.reserve(self._folder, need_bytes, may_evict=True)
            return need_bytes

    def _link(self, path: Path, size_bytes: int, content: str) -> None:
        blob = self._paths.blobs / content
        if blob.exists() and blob.stat().st_size == size_bytes:
            path.unlink()
            os.link(blob, path)
            self.shared_bytes += size_bytes
        else:
            blob.unlink(missing_ok=True)  # damaged; entries that link it keep it
            os.link(path, blob)
        self._space.spend(self._folder, -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)

    def seal(self) -> StoredWeights:
        """Completes the entry and returns it, in use by this process."""
        if not self._specs:
            raise InvalidArgumentError(f"nothing was put for {self.key}")
        self._reader.close()
        manifest = self._folder / MANIFEST
        entry = self._paths.entries / self.key.digest
        write_whole(manifest, manifest_of(self.key, self._specs))
        in_use = FileLock.take(manifest, create=False, shared=True)
        for index, path in enumerate(self._files.values()):  # failed tensors left gaps
            path.rename(self._folder / "t" / str(index))
        with FileLock.take(self._paths.mutex):
            for name in ("reserved", LOCK):
                (self._folder / name).unlink(missing_ok=True)
            try:
                os.rename(self._folder, entry)
            except OSError as error:
                in_use.release()
                raise WeightFileError(f"{entry} cannot be replaced: {error.strerror}") from error
            self._lock.release()
        return StoredWeights(entry, self.key, self._specs, in_use)

    def abandon(self) -> None:
        """Removes the unsealed entry. After `seal`, or a second time, it does nothing."""
        self._reader.close()
        if self._lock.fd < 0:
            return
        with FileLock.take(self._paths.mutex):
            remove_tree(self._folder)
            self._lock.release()
            self._space.clean()


def _spec_of(name: str, content: TensorContent, dtype: str | None) -> TensorSpec:
    found = _NAMES.get((content.code, content.bits))
    if dtype is not None and DTYPE_BYTES.get(dtype) != content.bits // 8:
        raise InvalidArgumentError(
            f"tensor {name} has elements of {content.bits} bits, not {dtype}"
        )
    if found is None and dtype is None:
        raise InvalidArgumentError(f"tensor {name} has an unnamed type; pass dtype")
    return TensorSpec(dtype or str(found), content.shape)


def _write(name: str, path: Path, chunks: Iterable[memoryview | bytes]) -> str:
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            try:
                rest = memoryview(chunk).cast("B")
            except TypeError as error:
                raise InvalidArgumentError(f"a chunk of tensor {name}: {error}") from error
            digest.update(rest)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


Produce = Callable[[WeightBuilder], None]
