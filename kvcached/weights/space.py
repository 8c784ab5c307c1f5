"""Size of a store, and evictions when it needs room."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kvcached.errors import StoreFullError
from kvcached.weights.locks import FileLock
from kvcached.weights.paths import LOCK, MANIFEST, StorePaths, remove_tree

_OS_BLOCK_BYTES = 512  # unit of st_blocks
_RESERVED = "reserved"


class StoreSpace:
    """Bytes of blobs, and bytes that makers of entries have reserved and not yet stored.

    REQUIRES: the store's mutex is held in every call.
    """

    def __init__(self, paths: StorePaths, max_bytes: int) -> None:
        self._paths = paths
        self.max_bytes = max_bytes
        self.evicted_entries = 0

    def used_bytes(self) -> int:
        """Returns the bytes in use. A tensor that entries share counts once."""
        with os.scandir(self._paths.blobs) as blobs:
            stored = sum(blob.stat().st_blocks for blob in blobs) * _OS_BLOCK_BYTES
        return stored + sum(_reserved_bytes(folder) for folder in self._paths.partial.iterdir())

    def reserve(self, folder: Path, more_bytes: int, *, may_evict: bool) -> None:
        """Reserves bytes for the entry that is made in `folder`, evicting others if needed.

        Raises StoreFullError if all remaining entries are in use.
        """
        self.clean()
        self.make_room(more_bytes, may_evict=may_evict)
        _write_reserved(folder, _reserved_bytes(folder) + more_bytes)

    def spend(self, folder: Path, size_bytes: int) -> None:
        """Releases a reservation of `folder` whose bytes are a blob now."""
        _write_reserved(folder, max(0, _reserved_bytes(folder) - size_bytes))

    def make_room(self, need_bytes: int, *, may_evict: bool = True) -> None:
        """Evicts the least recently used entries until there is room."""
        missing = self._missing_bytes(need_bytes)
        for entry in self._by_last_use() if may_evict and missing > 0 else []:
            if missing <= 0:
                break
            if self.evict(entry):
                missing = self._missing_bytes(need_bytes)
        if missing > 0:
            raise StoreFullError(
                f"the weight store {self._paths.root} lacks {missing} of {need_bytes} bytes and "
                "all of its entries are in use; raise its max_bytes, or free models",
                need_bytes,
                missing,
            )

    def evict(self, entry: Path) -> bool:
        """Removes an entry that is not in use, and its blobs if no other entry has them."""
        lock = FileLock.try_take(entry / MANIFEST)
        if lock is None and (entry / MANIFEST).exists():
            return False
        going = self._paths.new_partial()
        os.rename(entry, going)
        remove_tree(going)
        if lock is not None:
            lock.release()
        self._remove_orphans()
        self.evicted_entries += 1
        return True

    def clean(self) -> None:
        """Removes the folders of makers that died."""
        for folder in self._paths.partial.iterdir():
            lock = FileLock.try_take(folder / LOCK)
            if lock is not None:
                with lock:
                    remove_tree(folder)
            elif not (folder / LOCK).exists():
                remove_tree(folder)
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        with os.scandir(self._paths.blobs) as blobs:
            for blob in blobs:
                if blob.stat().st_nlink == 1:
                    os.unlink(blob.path)

    def _missing_bytes(self, need_bytes: int) -> int:
        system = os.statvfs(self._paths.root)
        over = self.used_bytes() + need_bytes - self.max_bytes
        return max(over, need_bytes - system.f_bavail * system.f_frsize)

    def _by_last_use(self) -> list[Path]:
        used = []
        for entry in self._paths.entries.iterdir():
            manifest = entry / MANIFEST
            used.append((manifest.stat().st_mtime_ns if manifest.exists() else 0, entry))
        return [entry for _, entry in sorted(used)]


def _reserved_bytes(folder: Path) -> int:
    try:
        content = (folder / _RESERVED).read_bytes()
    except FileNotFoundError:
        return 0
    return int(struct.unpack("<Q", content)[0]) if len(content) == 8 else 0


def _write_reserved(folder: Path, size_bytes: int) -> None:
    with os.fdopen(os.open(folder / _RESERVED, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(struct.pack("<Q", size_bytes))
