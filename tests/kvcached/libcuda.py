"""The test libcuda's control functions (tests/libcuda/control.h) in this process."""

from __future__ import annotations

import ctypes
from pathlib import Path


class LibCuda:
    """Counts driver calls, fails them, and says what the devices hold."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    DEINITIALIZED = 4

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.test_cuda_calls.restype = ctypes.c_uint64
        self.library.test_cuda_used_bytes.restype = ctypes.c_uint64
        self.library.test_cuda_refusal.restype = ctypes.c_char_p
        self.library.test_cuda_leaks.restype = ctypes.c_char_p

    def calls(self, function: str | None = None) -> int:
        return self.library.test_cuda_calls(function.encode() if function else None)

    def count(self) -> dict[str, int]:
        """Counted calls by function since the last reset, those that were made."""
        names = ("AddressReserve", "AddressFree", "Create", "Release", "Map", "Unmap", "SetAccess")
        counted = {name: self.calls(f"cuMem{name}") for name in names}
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

    def refusal(self) -> str:
        return self.library.test_cuda_refusal().decode()

    def leaks(self) -> str:
        return self.library.test_cuda_leaks().decode()
