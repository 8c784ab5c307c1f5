"""References of figures, measured by the driver alone on the same GPU in the same run."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from lab.gpu_check.driver import Driver, u64
from lab.gpu_check.sizes import MIB

LINK_PIECE_BYTES = 64 * MIB
COPY_BYTES = 1024 * MIB
_REPEATS = 3


def link_s(driver: Driver, size_bytes: int, piece_bytes: int = LINK_PIECE_BYTES) -> float:
    """Returns the seconds to copy bytes of pinned memory to the GPU by cuMemcpyHtoDAsync.

    One buffer is copied again and again. The result is the fastest of three.
    """
    piece_bytes = min(piece_bytes, size_bytes)
    source, stream = ctypes.c_void_p(), driver.stream()
    target = driver.allocate(piece_bytes)
    driver.call("cuMemAllocHost_v2", ctypes.byref(source), ctypes.c_size_t(piece_bytes))

    def copy() -> None:
        for start in range(0, size_bytes, piece_bytes):
            count = ctypes.c_size_t(min(piece_bytes, size_bytes - start))
            driver.call("cuMemcpyHtoDAsync_v2", u64(target), source, count, ctypes.c_void_p(stream))
        driver.synchronise(stream)

    try:
        return _fastest_s(copy)
    finally:
        driver.call("cuMemFreeHost", source)
        driver.free(target)


def read_s(driver: Driver, size_bytes: int, copy_bytes: int = COPY_BYTES) -> float:
    """Returns the seconds in which the GPU reads bytes of its memory. A copy within it reads and
    writes, and takes twice as long."""
    source, target = driver.allocate(copy_bytes), driver.allocate(copy_bytes)
    stream = driver.stream()

    def copy() -> None:
        size = ctypes.c_size_t(copy_bytes)
        driver.call("cuMemcpyDtoDAsync_v2", u64(target), u64(source), size, ctypes.c_void_p(stream))
        driver.synchronise(stream)

    try:
        return _fastest_s(copy) * size_bytes / (2 * copy_bytes)
    finally:
        driver.free(source)
        driver.free(target)


def _fastest_s(copy: Callable[[], None]) -> float:
    """Returns the seconds of the fastest copy, after one that is not timed."""
    taken_s = []
    for _ in range(_REPEATS + 1):
        began_s = time.perf_counter()
        copy()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s[1:])
