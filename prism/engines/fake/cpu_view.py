"""Address of a view's memory for the CPU."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_DLPACK_CPU = 1


def cpu_address(view: Any) -> int:
    """Returns the address at which this process may read and write the view.

    On a host device it is the view's own address. Memory of a CUDA device is not accessible to the
    CPU, but the test library that replaces the driver (`KVCACHED_LIBCUDA`) maps it at a constant
    distance (`FakeOptions.cpu_reads_gpu`).
    """
    address: int = view.address
    if view.__dlpack_device__()[0] == _DLPACK_CPU:
        return address
    distance = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"]).test_cuda_kernel_distance
    distance.restype = ctypes.c_uint64
    return address + int(distance())
