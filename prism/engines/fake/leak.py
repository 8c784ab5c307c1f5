"""GPU memory that an engine takes in excess of its lease, like a leak in a library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from prism.errors import EngineError


def take(device: str, size_bytes: int) -> None:
    """Allocates device memory outside of kvcached and of every lease, until the process ends.

    Raises EngineError if the driver fails. REQUIRES: the process has a client on the device.
    """
    cuda = ctypes.CDLL(os.environ.get("KVCACHED_LIBCUDA") or "libcuda.so.1")
    ordinal = int(device.partition(":")[2])
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    calls: tuple[Callable[[], int], ...] = (
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal),
        lambda: cuda.cuCtxPushCurrent_v2(context),
        lambda: cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)),
        lambda: cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())),
    )
    for number, call in enumerate(calls):
        if error := call():
            raise EngineError(f"PRISM_FAKE cannot leak on {device}: call {number}, error {error}")
