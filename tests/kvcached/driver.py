"""Direct CUDA calls on the test libcuda, and processes that make them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .compiling import ROOT
from .libcuda import LibCuda

MEGABYTE = 1 << 20
PAGE = 2 * MEGABYTE  # the granularity of GPUs
UNIT = 4096  # of devices in the test process itself
INVALID_VALUE, NOT_INITIALIZED, INVALID_DEVICE, INVALID_CONTEXT = 1, 3, 101, 201
READ_ONLY, READ_WRITE = 1, 3


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Prop(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """CUDA's calls on a device in its primary context, which return the driver's result."""

    DEVICE = 1

    def __init__(self, libcuda: LibCuda, device: int = DEVICE) -> None:
        self.cu = libcuda.library
        self.device = device
        self.refusal = libcuda.refusal
        assert self.cu.cuInit(0) == 0
        context = ctypes.c_void_p()
        assert self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self.cu.cuCtxPushCurrent_v2(context) == 0

    def leave(self) -> None:
        assert self.cu.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0
        assert self.cu.cuDevicePrimaryCtxRelease_v2(self.device) == 0

    def reserve(self, size: int, alignment: int = 0) -> tuple[int, int]:
        address = ctypes.c_uint64()
        result = self.cu.cuMemAddressReserve(ctypes.byref(address), *u64(size, alignment, 0, 0))
        return result, address.value

    def create(
        self, size: int, device: int | None = None, kind: int = 1, handle_types: int = 0
    ) -> tuple[int, int]:
        handle = ctypes.c_uint64()
        location = Location(1, self.device if device is None else device)
        prop = Prop(type=kind, requested_handle_types=handle_types, location=location)
        result = self.cu.cuMemCreate(ctypes.byref(handle), *u64(size), ctypes.byref(prop), *u64(0))
        return result, handle.value

    def map(self, address: int, size: int, handle: int, offset: int = 0) -> int:
        return self.cu.cuMemMap(*u64(address, size, offset, handle, 0))

    def set_access(
        self, address: int, size: int, device: int | None = None, flags: int = READ_WRITE
    ) -> int:
        access = Access(Location(1, self.device if device is None else device), flags)
        return self.cu.cuMemSetAccess(*u64(address, size), ctypes.byref(access), *u64(1))

    def unmap(self, address: int, size: int) -> int:
        return self.cu.cuMemUnmap(*u64(address, size))

    def release(self, handle: int) -> int:
        return self.cu.cuMemRelease(*u64(handle))

    def free(self, address: int, size: int) -> int:
        return self.cu.cuMemAddressFree(*u64(address, size))

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocates plain memory, for free_plain."""
        address = ctypes.c_uint64()
        return self.cu.cuMemAlloc_v2(ctypes.byref(address), *u64(size)), address.value

    def free_plain(self, address: int) -> int:
        return self.cu.cuMemFree_v2(*u64(address))

    def export(self, handle: int) -> tuple[int, int]:
        fd = ctypes.c_int()
        return self.cu.cuMemExportToShareableHandle(
            ctypes.byref(fd), *u64(handle), 1, *u64(0)
        ), fd.value

    def take_in(self, fd: int) -> tuple[int, int]:
        """Returns a handle for memory that another process exported."""
        handle = ctypes.c_uint64()
        result = self.cu.cuMemImportFromShareableHandle(
            ctypes.byref(handle), ctypes.c_void_p(fd), 1
        )
        return result, handle.value

    def copy_out(self, address: int, size: int = 1) -> int:
        target = ctypes.create_string_buffer(size)
        return self.cu.cuMemcpyDtoH_v2(target, *u64(address, size))

    def read(self, address: int, size: int) -> bytes:
        content = ctypes.create_string_buffer(size)
        assert self.cu.cuMemcpyDtoH_v2(content, *u64(address, size)) == 0
        return content.raw

    def fill(self, address: int, value: int, size: int) -> int:
        """Fills memory and waits until that is done."""
        return self.start_fill(address, value, size) or self.cu.cuCtxSynchronize()

    def start_fill(self, address: int, value: int, size: int) -> int:
        return self.cu.cuMemsetD8_v2(*u64(address), ctypes.c_ubyte(value), *u64(size))

    def view(self, address: int, size: int, *, writes: bool = False) -> int | None:
        """Returns the address that a kernel uses for the range, or None."""
        self.cu.test_cuda_kernel_view.restype = ctypes.c_void_p
        found: int | None = self.cu.test_cuda_kernel_view(*u64(address, size), int(writes))
        return found

    def free_bytes(self) -> int:
        """Returns the free bytes of the device, which all processes share."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value


@contextmanager
def mapped(driver: Driver, size: int = UNIT) -> Iterator[tuple[int, int]]:
    """Yields the address and handle of memory with access, followed by a hole of the same size."""
    address, handle = driver.reserve(2 * size)[1], driver.create(size)[1]
    assert driver.map(address, size, handle) == driver.set_access(address, size) == 0
    yield address, handle
    assert driver.unmap(address, size) == driver.release(handle) == 0
    assert driver.free(address, 2 * size) == 0


@contextmanager
def open_driver(libcuda: LibCuda) -> Iterator[Driver]:
    """Yields a driver that leaks nothing."""
    left_before = libcuda.leaks()
    made = Driver(libcuda)
    yield made
    made.leave()
    assert libcuda.leaks() == left_before


def u64(*values: int) -> list[ctypes.c_uint64]:
    return [ctypes.c_uint64(value) for value in values]


START = """
import ctypes, os, signal, sys, time
from pathlib import Path
from tests.kvcached.driver import MEGABYTE, PAGE, Driver, mapped, u64
from tests.kvcached.libcuda import LibCuda
libcuda = LibCuda(Path(os.environ["KVCACHED_LIBCUDA"]))
cu = libcuda.library
address, context, count = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_int()
"""


def start_with(libcuda: LibCuda, code: str, **env: str) -> subprocess.Popen[str]:
    """Starts a process that calls the library directly, with the granularity of GPUs."""
    settings = {
        "KVCACHED_LIBCUDA": str(libcuda.path),
        "KVCACHED_TEST_CUDA_GRANULARITY": str(PAGE),
        "KVCACHED_TEST_CUDA_BYTES": str(64 * MEGABYTE),
    }
    return subprocess.Popen(
        [sys.executable, "-c", START + code],
        env={**os.environ, **settings, **env},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_with(libcuda: LibCuda, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    process = start_with(libcuda, code, **env)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
