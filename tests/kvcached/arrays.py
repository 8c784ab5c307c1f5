"""Views as numpy arrays on every device of the tests. Imported by worker.py as well."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np

import kvcached


def as_array(source: Any) -> Any:
    """A numpy array on the memory of a view or of a whole virtual tensor.

    numpy takes no tensor of a GPU; the test libcuda's GPU is host memory at the same address.
    """
    if source.__dlpack_device__()[0] == 1:
        return np.from_dlpack(source)
    if isinstance(source, kvcached.VirtualTensor):
        source = source.view([source.size_bytes], "uint8")
    dtype = np.dtype(source.dtype)
    raw = (ctypes.c_uint8 * (prod(source.shape) * dtype.itemsize)).from_address(source.address)
    return np.frombuffer(raw, dtype=dtype).reshape(source.shape)
