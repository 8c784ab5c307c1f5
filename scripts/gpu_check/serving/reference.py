"""What figures are compared with, measured by the driver alone on the same GPU in the same run."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from scripts.gpu_check.driver import Driver, u64
from scripts.gpu_check.sizes import MIB

LINK_PIECE_BYTES = 64 * MIB
COPY_BYTES = 1024 * MIB
_REPEATS = 3


def link_s(driver: Driver, size_bytes: int, piece_bytes: int = LINK_PIECE_BYTES) -> float:
    """Seconds in which so many bytes of pinned memory reach the GPU by cuMemcpyHtoDAsync, nothing
    read meanwhile: one buffer, again and again. The fastest of three."""
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
    """Seconds in which the GPU reads so many bytes of its memory: half of what a copy within it
    takes, which writes as many."""
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
    """After one that warms up."""
    taken_s = []
    for _ in range(_REPEATS + 1):
        began_s = time.perf_counter()
        copy()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s[1:])
