"""Views as numpy arrays on every device of the tests. Imported by worker.py as well."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

import kvcached

STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def kernel_view(address: int) -> int:
    """Returns the address that kernels of this process use for memory of the test libcuda."""
    distance = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"]).test_cuda_kernel_distance
    distance.restype = ctypes.c_uint64
    assert distance(), "no CUDA device was opened in this process"
    return address + distance()


def as_array(source: Any) -> Any:
    """Returns a numpy array on the memory of a view or of a whole virtual tensor.

    numpy accepts no tensor of a GPU; the test libcuda maps its GPU's memory at a second address.
    Types that numpy lacks come as unsigned integers of their size.
    """
    known = getattr(source, "dtype", "uint8") not in STORED_AS
    on_cpu = source.__dlpack_device__()[0] == 1
    if known and on_cpu:
        return np.from_dlpack(source)
    if isinstance(source, kvcached.VirtualTensor):
        source = source.view([source.size_bytes], "uint8")
    dtype = np.dtype(STORED_AS.get(source.dtype, source.dtype))
    last = [(extent - 1) * step for extent, step in zip(source.shape, source.strides, strict=True)]
    raw = (ctypes.c_uint8 * ((sum(last) + 1) * dtype.itemsize)).from_address(
        source.address if on_cpu else kernel_view(source.address)
    )
    strides = [step * dtype.itemsize for step in source.strides]
    return np.ndarray(source.shape, dtype, raw, strides=strides)
