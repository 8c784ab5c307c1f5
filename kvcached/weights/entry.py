"""Sealed set of tensors in the store, in use by this process until it is closed."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcached.checks import by_name, checked, instance_of, not_negative, positive, text
from kvcached.errors import ClosedError, InvalidArgumentError, WeightFileError
from kvcached.weights.locks import FileLock, descriptor_needed
from kvcached.weights.paths import MANIFEST
from kvcached.weights.spec import TensorSpec, WeightLayout, check_specs


@dataclass(frozen=True, slots=True)
class WeightKey:
    """Key of an entry: the checkpoint's content, and the form in which an engine needs it."""

    content: str
    """Result of `WeightStore.content_of`."""
    engine: str
    """Everything that shapes the tensors besides dtype and rank: engine, version, packing."""
    dtype: str
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("content", "engine", "dtype"):
            text(name, getattr(self, name))
        if not (self.content and self.engine and self.dtype):
            raise InvalidArgumentError("content, engine and dtype must not be empty")
        if not_negative("rank", self.rank) >= positive("ranks", self.ranks):
            raise InvalidArgumentError(f"rank {self.rank} must be below ranks, {self.ranks}")

    @property
    def digest(self) -> str:
        """Name of the entry's folder."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


def checkpoint_key(content: str) -> WeightKey:
    """Returns the key of a checkpoint's own tensors, as its files have them."""
    return WeightKey(content, "checkpoint", "as-stored")


def manifest_of(key: WeightKey, specs: Mapping[str, TensorSpec]) -> bytes:
    """Returns a manifest with the tensors in the order of their files' numbers."""
    tensors = [[name, spec.dtype, list(spec.shape)] for name, spec in specs.items()]
    body = {"key": asdict(key), "tensors": tensors}
    return json.dumps({**body, "check": _check(body)}).encode()


def _check(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


class StoredWeights:
    """Tensors that stay in the store while this object is open.

    Close it, or use it with `with`. The end of the process closes it too. Thread rule: any thread
    reads; one closes, when no other reads.
    """

    def __init__(
        self, folder: Path, key: WeightKey, specs: Mapping[str, TensorSpec], lock: FileLock
    ) -> None:
        self.key = key
        self.specs = specs
        self._folder = folder
        self._index = {name: index for index, name in enumerate(specs)}
        self._lock = lock
        self._touch()

    def __repr__(self) -> str:
        return f"StoredWeights({self.key}, {len(self.specs)} tensors, {self.size_bytes} bytes)"

    @classmethod
    def open(cls, folder: Path) -> StoredWeights | None:
        """Opens an entry, or returns None if it does not exist.

        Raises WeightFileError with the name of a damaged file.
        """
        manifest = folder / MANIFEST
        try:
            lock = FileLock.take(manifest, create=False, shared=True)
        except FileNotFoundError:
            return None
        if not lock.is_at(manifest):  # evicted while this process waited
            lock.release()
            return None
        try:
            key, specs = _read_manifest(manifest)
            _check_sizes(folder, specs)
        except BaseException:
            lock.release()
            raise
        return cls(folder, key, specs, lock)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, including those that other entries share."""
        return sum(spec.size_bytes for spec in self.specs.values())

    def layout(self) -> WeightLayout:
        """Returns a layout for an arena with these tensors in this order."""
        return WeightLayout.of(self.specs)

    @checked(name=text)
    def path(self, name: str) -> Path:
        """Returns the file that contains a tensor's bytes alone. Never write to it."""
        if self._lock.fd < 0:
            raise ClosedError("these weights are closed; get them from the store again")
        if name not in self._index:
            raise InvalidArgumentError(f"tensor {name!r} is not among these weights")
        return self._folder / "t" / str(self._index[name])

    def buffer(self, name: str) -> mmap.mmap | bytearray:
        """Returns a tensor's bytes without copying, for `numpy.frombuffer` or `torch.frombuffer`.

        Writes go to private pages of this process. The buffer may outlive this object.
        """
        path = self.path(name)
        if self.specs[name].size_bytes == 0:
            return bytearray()
        with descriptor_needed(path), path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def will_need(self) -> None:
        """Asks the OS to load the tensors into memory soon. In a tmpfs store they always are."""
        for name in self.specs:
            path = self.path(name)
            with descriptor_needed(path), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    @checked(specs=by_name(instance_of(TensorSpec)))
    def expect(self, specs: Mapping[str, TensorSpec]) -> None:
        """Raises WeightMismatchError unless the tensors have these names, types and shapes."""
        check_specs(f"the weights stored as {self.key}", self.specs, specs)

    def close(self) -> None:
        """Lets the store evict the entry. A second call does nothing."""
        if self._lock.fd >= 0:
            self._touch()
        self._lock.release()

    def _touch(self) -> None:
        # Sets the order of eviction. The kernel's own time has the resolution of a tick.
        now_ns = time.time_ns()
        os.utime(self._lock.fd, ns=(now_ns, now_ns))

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_manifest(manifest: Path) -> tuple[WeightKey, dict[str, TensorSpec]]:
    try:
        body = json.loads(manifest.read_bytes())
        if body.pop("check") != _check(body):
            raise ValueError("the checksum does not match")
        tensors = body["tensors"]
        specs = {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in tensors}
        return WeightKey(**body["key"]), specs
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{manifest} is damaged: {error}") from error


def _check_sizes(folder: Path, specs: Mapping[str, TensorSpec]) -> None:
    for index, (name, spec) in enumerate(specs.items()):
        path = folder / "t" / str(index)
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise WeightFileError(f"{path}, tensor {name}, is missing") from error
        if size_bytes != spec.size_bytes:
            raise WeightFileError(
                f"{path}, tensor {name}, has {size_bytes} bytes, not {spec.size_bytes}"
            )
