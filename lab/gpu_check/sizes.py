"""Sizes of the checks, derived from free memory, so that a small GPU runs the same checks."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
PAGE_BYTES = 2 * MIB


SHM = Path("/dev/shm")
PATH_BYTES_MAX = 80  # of a folder with sockets, whose paths are bounded to 107


def shm_free_bytes() -> int:
    """Returns the free bytes of /dev/shm, 0 where it is missing."""
    return shutil.disk_usage(SHM).free if SHM.is_dir() else 0


def store_name(work: Path) -> str:
    """Returns the name of a run's folder in /dev/shm, which is removed when the run ends."""
    return f"gpu-check-{hashlib.sha256(str(work.resolve()).encode()).hexdigest()[:8]}"


def short_folder(work: Path, name: str) -> Path:
    """Returns a folder whose path is short enough for sockets, in `work` or in /dev/shm."""
    folder = work / name
    return folder if len(os.fsencode(folder)) <= PATH_BYTES_MAX else SHM / store_name(work) / name


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes for a machine with this free memory."""

    free_bytes: int
    shm_free_bytes: int

    @classmethod
    def of(cls, free_bytes: int) -> Sizes:
        return cls(free_bytes, shm_free_bytes())

    @property
    def is_large(self) -> bool:
        """True where two models of about a billion parameters and their references fit."""
        return self.free_bytes >= 24 * GIB

    def pages(self, most: int, share: float = 0.25) -> int:
        """Returns the number of pages in a share of the free memory, at most `most`."""
        return max(8, min(most, int(self.free_bytes * share) // PAGE_BYTES))

    @property
    def store_bytes(self) -> int:
        """Bytes for weights in /dev/shm: half of its free bytes, at most those of two models."""
        return min(self.shm_free_bytes // 2, 8 * GIB)

    def store_folder(self, fallback: Path, need_bytes: int) -> Path:
        """Returns /dev/shm, or a folder on disk where `need_bytes` do not fit into it twice."""
        return SHM if self.shm_free_bytes > 2 * need_bytes else fallback
