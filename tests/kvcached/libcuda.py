"""The test libcuda's control functions (tests/libcuda/control.h) in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


class LibCuda:
    """Control of the test libcuda: counts and fails driver calls, reports the devices' memory."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    DEINITIALIZED = 4

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.test_cuda_calls.restype = ctypes.c_uint64
        self.library.test_cuda_used_bytes.restype = ctypes.c_uint64
        self.library.test_cuda_violations.restype = ctypes.c_uint64
        self.library.test_cuda_refusal.restype = ctypes.c_char_p
        self.library.test_cuda_leaks.restype = ctypes.c_char_p

    def calls(self, function: str | None = None) -> int:
        return self.library.test_cuda_calls(function.encode() if function else None)

    def count(self) -> dict[str, int]:
        """Returns the counted calls since the last reset by function, without zeros."""
        names = ("AddressReserve", "AddressFree", "Create", "Release", "Map", "Unmap", "SetAccess")
        counted = {name: self.calls(f"cuMem{name}") for name in names}
        counted |= {name: self.calls(f"cu{name}") for name in ("EventRecord", "EventQuery")}
        return {name: calls for name, calls in counted.items() if calls}

    def reset(self) -> None:
        self.library.test_cuda_reset_calls()

    def fail_at(self, call: int, times: int = 1, error: int = INVALID_VALUE) -> None:
        self.library.test_cuda_fail_at(
            ctypes.c_uint64(call), ctypes.c_uint64(times), ctypes.c_int(error)
        )

    def pass_all(self) -> None:
        self.fail_at(0, 0)

    def used_bytes(self, device: int = 0) -> int:
        return self.library.test_cuda_used_bytes(device)

    def violations(self) -> int:
        """Returns how often memory was taken away from a kernel."""
        return self.library.test_cuda_violations()

    def refusal(self) -> str:
        return self.library.test_cuda_refusal().decode()

    def leaks(self) -> str:
        return self.library.test_cuda_leaks().decode()


class CudaStream:
    """Stream of the test libcuda on a device. Its kernels end when the test completes them."""

    def __init__(self, libcuda: LibCuda, device: int = 0) -> None:
        self.cu = libcuda.library
        self.device = device
        self.context, made = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.cu.cuInit(0) == 0
        assert self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device) == 0
        self.answer(lambda: self.cu.cuStreamCreate(ctypes.byref(made), 0))
        self.handle = made.value or 0

    def answer(self, call: Callable[[], int]) -> None:
        """Makes a call in the device's context, which must succeed."""
        assert self.cu.cuCtxPushCurrent_v2(self.context) == 0
        result = call()
        assert self.cu.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0
        assert result == 0

    def submit(self, address: int = 0, size_bytes: int = 1) -> None:
        """Launches a kernel that may touch the range from now on."""
        arguments = [ctypes.c_uint64(value) for value in (self.handle, address, size_bytes)]
        self.answer(lambda: self.cu.test_cuda_launch(*arguments))

    def complete(self) -> None:
        """Completes the oldest kernel."""
        arguments = [ctypes.c_uint64(value) for value in (self.handle, 1)]

        def call() -> int:
            self.cu.test_cuda_complete(*arguments)
            return 0

        self.answer(call)

    def close(self) -> None:
        self.answer(lambda: self.cu.cuStreamDestroy_v2(ctypes.c_void_p(self.handle)))
        assert self.cu.cuDevicePrimaryCtxRelease_v2(self.device) == 0
