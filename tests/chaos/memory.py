"""Resident memory of a cluster's parts over time, and whether it grows."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from tests.chaos.faults import Striker, parts

_PAGE_BYTES = 4096
MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    """Returns resident bytes without shared ones: an engine maps its device's memory."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


class MemoryWatch:
    """`run` samples each process until it is cancelled. One that is replaced is another one."""

    def __init__(self, striker: Striker, every_s: float) -> None:
        self._striker, self._every_s = striker, every_s
        self._samples: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)

    async def run(self) -> None:
        while True:
            for pid, part in parts(self._striker.cluster).items():
                self._samples[part, pid].append((time.monotonic(), resident_bytes(pid)))
            await asyncio.sleep(self._every_s)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Maps "part pid" to MiB per hour and its standard error.

        Computes least squares over the later three quarters of the samples. Leaves out processes
        with too few samples.
        """
        found = {}
        for (part, pid), samples in self._samples.items():
            later = np.asarray(samples[len(samples) // 4 :], dtype=float)
            if len(later) < 20:
                continue
            (slope, _), errors = np.polyfit(later[:, 0], later[:, 1], 1, cov=True)
            found[f"{part} {pid}"] = (slope * 3600 / MIB, float(np.sqrt(errors[0, 0])) * 3600 / MIB)
        return found

    def peak_growth_bytes(self) -> dict[str, int]:
        """Maps each part to the largest growth of one of its processes since the first sample."""
        grown: dict[str, int] = defaultdict(int)
        for (part, _), samples in self._samples.items():
            sizes = [size for _, size in samples]
            grown[part] = max(grown[part], max(sizes) - sizes[0])
        return dict(grown)
