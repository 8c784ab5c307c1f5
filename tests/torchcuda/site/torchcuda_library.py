"""The front's library (tests/torchcuda/front), and its functions that all Python parts call."""

from __future__ import annotations

import ctypes
import os
from typing import Any

CUDA = 1  # c10::DeviceType
_MESSAGE_BYTES = 4096


def _declare(front: Any) -> None:
    u64, pool = ctypes.c_uint64, [ctypes.c_int, ctypes.c_ulonglong, ctypes.c_ulonglong]
    front.torchcuda_current_stream.restype = u64
    front.torchcuda_kernel_distance.restype = u64
    front.torchcuda_memory_fraction.restype = ctypes.c_double
    front.torchcuda_set_memory_fraction.argtypes = [ctypes.c_int, ctypes.c_double]
    front.torchcuda_error.restype = ctypes.c_char_p
    for name in ("capture_end", "graph_free"):
        getattr(front, f"torchcuda_{name}").argtypes = [ctypes.c_void_p]
    front.torchcuda_replay.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    for name in ("begin_pool", "end_pool", "release_pool"):
        getattr(front, f"torchcuda_{name}").argtypes = pool


def checked(function: Any, *arguments: Any) -> None:
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if function(*arguments, message, _MESSAGE_BYTES):
        raise RuntimeError(message.value.decode())


def kernel_distance() -> int:
    """Returns the distance from a device address to the address that kernels use."""
    return int(library.torchcuda_kernel_distance())


def current_device() -> int:
    return int(library.torchcuda_current_device())


def current_stream(device: int) -> int:
    return int(library.torchcuda_current_stream(device))


library: Any = ctypes.CDLL(os.environ["TORCHCUDA_FRONT"])
_declare(library)
