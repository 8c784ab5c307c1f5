"""NVIDIA's driver by ctypes: the calls of the steps, with CUDA's own result codes."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from lab.gpu_check.report import Skip

SEEN_GPU = "PRISM_GPU_CHECK_SEEN"  # set by the runner once the step "facts" found a GPU
READ, READ_WRITE = 1, 3
POSIX_FILE = 1
NON_BLOCKING = 1
NOT_READY = 600
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
VIRTUAL_MEMORY_SUPPORTED, POSIX_FILES_SUPPORTED = 102, 103
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76


class DriverError(RuntimeError):
    """Failure of a call that has to succeed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} answers {name} ({code})")
        self.code = code


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def library_name() -> str:
    """Returns the name of the library that kvcached loads."""
    return os.environ.get("KVCACHED_LIBCUDA", "libcuda.so.1")


def u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


class Driver:
    """libcuda on one device. `open` retains its primary context and enters it in this thread."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.cu = ctypes.CDLL(library_name())

    @classmethod
    def open(cls, index: int = 0) -> Driver:
        driver = cls(index)
        driver.call("cuInit", 0)
        driver.enter()
        return driver

    def enter(self) -> None:
        """Retains the primary context and makes it current in the calling thread."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), self.index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)

    def code(self, name: str, *arguments: Any) -> int:
        """Returns the result of a call, 0 for success. Raises DriverError if it is
        missing."""
        function = getattr(self.cu, name, None)
        if function is None:
            raise DriverError(name, 500, "CUDA_ERROR_NOT_FOUND: the driver does not have this call")
        return int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise DriverError(name, code, self.name_of(code))

    def name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        found = self.cu.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        return found.decode() if found else "an error without a name"

    # --- the device ------------------------------------------------------------------------

    def attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self.index)
        return value.value

    def count(self) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(value))
        return value.value

    def version(self) -> str:
        """Returns the version of CUDA that the driver supports, such as "13.0"."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    def device_name(self) -> str:
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self.index)
        return name.value.decode(errors="replace")

    def memory(self) -> tuple[int, int]:
        """Returns (free, total) bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def free_bytes(self) -> int:
        return self.memory()[0]

    # --- virtual memory --------------------------------------------------------------------

    def prop(self, handle_types: int = 0) -> AllocationProp:
        return AllocationProp(type=1, handle_types=handle_types, location=Location(1, self.index))

    def granularity(self, kind: int = 0) -> int:
        """Returns the minimum (`kind` 0) or recommended (`kind` 1) granularity in bytes."""
        size = ctypes.c_size_t()
        prop = self.prop()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(prop), kind)
        return size.value

    def reserve(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(size_bytes)
        zero = ctypes.c_size_t(0)
        self.call("cuMemAddressReserve", ctypes.byref(address), size, zero, u64(0), u64(0))
        return address.value

    def free_address(self, address: int, size_bytes: int) -> None:
        self.call("cuMemAddressFree", u64(address), ctypes.c_size_t(size_bytes))

    def create_code(self, size_bytes: int, handle_types: int = 0) -> tuple[int, int]:
        """Returns (result code, handle)."""
        handle = ctypes.c_uint64()
        prop = self.prop(handle_types)
        size = ctypes.c_size_t(size_bytes)
        code = self.code("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(prop), u64(0))
        return code, handle.value

    def create(self, size_bytes: int, handle_types: int = 0) -> int:
        code, handle = self.create_code(size_bytes, handle_types)
        if code:
            raise DriverError("cuMemCreate", code, self.name_of(code))
        return handle

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", u64(handle))

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        size, zero = ctypes.c_size_t(size_bytes), ctypes.c_size_t(0)
        self.call("cuMemMap", u64(address), size, zero, u64(handle), u64(0))

    def map_pages(self, pages: int, page_bytes: int) -> tuple[int, list[int]]:
        """Creates pages and maps them one after another. Returns their address and handles."""
        address = self.reserve(pages * page_bytes)
        handles = [self.create(page_bytes) for _ in range(pages)]
        for number, handle in enumerate(handles):
            self.map(address + number * page_bytes, page_bytes, handle)
        self.allow(address, pages * page_bytes)
        return address, handles

    def remove_pages(self, address: int, handles: list[int], page_bytes: int) -> None:
        """Unmaps and releases what `map_pages` returned."""
        self.unmap(address, len(handles) * page_bytes)
        for handle in handles:
            self.release(handle)
        self.free_address(address, len(handles) * page_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        self.call("cuMemUnmap", u64(address), ctypes.c_size_t(size_bytes))

    def allow_code(self, address: int, size_bytes: int, flags: int = READ_WRITE) -> int:
        access = Access(Location(1, self.index), flags)
        size, one = ctypes.c_size_t(size_bytes), ctypes.c_size_t(1)
        return self.code("cuMemSetAccess", u64(address), size, ctypes.byref(access), one)

    def allow(self, address: int, size_bytes: int, flags: int = READ_WRITE) -> None:
        if code := self.allow_code(address, size_bytes, flags):
            raise DriverError("cuMemSetAccess", code, self.name_of(code))

    def access(self, address: int) -> int:
        flags, location = ctypes.c_ulonglong(), Location(1, self.index)
        self.call("cuMemGetAccess", ctypes.byref(flags), ctypes.byref(location), u64(address))
        return flags.value

    def export_file(self, handle: int) -> int:
        """Returns a descriptor that another process can import."""
        made = ctypes.c_int(-1)
        arguments = ctypes.byref(made), u64(handle), POSIX_FILE, u64(0)
        self.call("cuMemExportToShareableHandle", *arguments)
        return made.value

    def import_file(self, fd: int) -> int:
        handle = ctypes.c_uint64()
        file = ctypes.c_void_p(fd)
        self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), file, POSIX_FILE)
        return handle.value

    # --- contents, streams -----------------------------------------------------------------

    def allocate(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", u64(address))

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Fills memory and waits until that is done."""
        self.call("cuMemsetD8_v2", u64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size_bytes))
        self.call("cuCtxSynchronize")

    def fill_behind(self, stream: int, address: int, value: int, size_bytes: int) -> None:
        byte, size = ctypes.c_ubyte(value), ctypes.c_size_t(size_bytes)
        self.call("cuMemsetD8Async", u64(address), byte, size, ctypes.c_void_p(stream))

    def read(self, address: int, size_bytes: int) -> bytes:
        content = ctypes.create_string_buffer(size_bytes)
        self.call("cuMemcpyDtoH_v2", content, u64(address), ctypes.c_size_t(size_bytes))
        return content.raw

    def stream(self, flags: int = NON_BLOCKING) -> int:
        made = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(made), flags)
        return made.value or 0

    def event(self) -> int:
        made = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(made), 2)  # without timing, as kvcached's are
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def query_code(self, event: int) -> int:
        return self.code("cuEventQuery", ctypes.c_void_p(event))

    def synchronise(self, stream: int) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))


def open_or_skip(index: int = 0) -> Driver:
    """Returns the driver with a context on the device. Raises what `skipped` returns."""
    try:
        return Driver.open(index)
    except (OSError, DriverError) as error:
        raise skipped(error) from error


def skipped(error: Exception) -> Exception:
    """Returns Skip for an error that means that this machine lacks a GPU. Where the step "facts"
    found one, returns the error itself, since the loss of a GPU is a failure."""
    return error if os.environ.get(SEEN_GPU) else Skip(f"no usable GPU: {error}")
