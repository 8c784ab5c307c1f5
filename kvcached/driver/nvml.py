"""GPUs as NVIDIA's management library (NVML) reports them, without a CUDA context.

The library is libnvidia-ml.so.1, or the one that the environment variable KVCACHED_LIBNVML names.
Thread rule: any thread.

The package nvidia-ml-py is not used. It loads one library per process under a fixed name into
globals that it shares with the engine, takes 70 ms to import instead of 6 ms, and has no types.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char, c_uint, c_uint64, c_void_p
from functools import lru_cache

from kvcached.errors import (
    BackendUnavailableError,
    HiddenDeviceError,
    NoDriverError,
    UnknownDeviceError,
    UnsupportedDeviceError,
)
from kvcached.usage import GpuFacts, ProcessMemory

_DEFAULT_PATH = "libnvidia-ml.so.1"
_TEXT_BYTES = 256
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_INSUFFICIENT_SIZE = 7
_MOST_PROCESSES = 4096


class _MemoryV1(ctypes.Structure):
    _fields_ = [("total", c_uint64), ("free", c_uint64), ("used", c_uint64)]


class _MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", c_uint),
        ("total", c_uint64),
        ("reserved", c_uint64),
        ("free", c_uint64),
        ("used", c_uint64),
    ]


_MEMORY_V2 = ctypes.sizeof(_MemoryV2) | 2 << 24


class _Process(ctypes.Structure):
    _fields_ = [("pid", c_uint), ("used", c_uint64), ("instance", c_uint), ("compute", c_uint)]


class Nvml:
    """NVML, loaded and initialised in this process."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NoDriverError(
                f"NVIDIA's management library cannot be loaded: {error}; install the driver (in a "
                "container, start it with the 'utility' capability)"
            ) from None
        self._call("nvmlInit_v2")

    def _answer(self, function: str, *arguments: object) -> int:
        found = getattr(self._library, function, None)
        if found is None:
            raise BackendUnavailableError(f"NVML does not have {function}; update NVIDIA's driver")
        return int(found(*arguments))

    def _call(self, function: str, *arguments: object) -> None:
        result = self._answer(function, *arguments)
        if result == 0:
            return
        text = self._library.nvmlErrorString
        text.restype = ctypes.c_char_p
        raise BackendUnavailableError(f"{function}: {(text(result) or b'').decode()} ({result})")

    def _text(self, function: str, *arguments: object) -> str:
        text = (c_char * _TEXT_BYTES)()
        self._call(function, *arguments, text, c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def handles(self) -> list[c_void_p]:
        """Returns all GPUs of the machine, in the order of their PCI addresses."""
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        return [self._by_index(index) for index in range(count.value)]

    def _by_index(self, index: int) -> c_void_p:
        handle = c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
        return handle

    def uuid(self, handle: c_void_p) -> str:
        """Returns the UUID, GPU-... as in CUDA_VISIBLE_DEVICES."""
        return self._text("nvmlDeviceGetUUID", handle)

    def name(self, handle: c_void_p) -> str:
        """Returns the product's name."""
        return self._text("nvmlDeviceGetName", handle)

    def facts(self, handle: c_void_p) -> GpuFacts:
        """Returns name, UUID, driver version, MIG state and memory."""
        mode, pending = c_uint(), c_uint()
        known = self._answer("nvmlDeviceGetMigMode", handle, byref(mode), byref(pending)) == 0
        version = self._text("nvmlSystemGetDriverVersion")
        try:
            memory = self.memory(handle)
        except BackendUnavailableError:  # refused for a GPU that is split into MIG instances
            memory = (0, 0)
        is_mig = known and mode.value == 1
        return GpuFacts(self.name(handle), self.uuid(handle), version, is_mig, *memory)

    def memory(self, handle: c_void_p) -> tuple[int, int]:
        """Returns (total, free) bytes without the driver's reserved memory."""
        newer = _MemoryV2(version=_MEMORY_V2)
        has_v2 = hasattr(self._library, "nvmlDeviceGetMemoryInfo_v2")
        if has_v2 and self._answer("nvmlDeviceGetMemoryInfo_v2", handle, byref(newer)) == 0:
            return newer.total - newer.reserved, newer.free
        older = _MemoryV1()
        self._call("nvmlDeviceGetMemoryInfo", handle, byref(older))
        return older.total, older.free

    def processes(self, handle: c_void_p) -> tuple[ProcessMemory, ...]:
        """Returns the processes that compute on the GPU, with MPS clients."""
        found = self._running("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        if hasattr(self._library, "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
            found |= self._running("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)
        return tuple(
            ProcessMemory(pid, None if used == _NOT_AVAILABLE else used, self._process_name(pid))
            for pid, used in sorted(found.items())
        )

    def _running(self, function: str, handle: c_void_p) -> dict[int, int]:
        room = 32
        while room <= _MOST_PROCESSES:
            count, entries = c_uint(room), (_Process * room)()
            result = self._answer(function, handle, byref(count), entries)
            if result == _INSUFFICIENT_SIZE:
                room = max(2 * room, count.value)
                continue
            return {e.pid: e.used for e in entries[: count.value]} if result == 0 else {}
        return {}

    def _process_name(self, pid: int) -> str:
        try:
            return self._text("nvmlSystemGetProcessName", c_uint(pid))
        except BackendUnavailableError:
            return ""  # the process ended, or is in another pid namespace

    def find(self, device: str) -> c_void_p:
        """Returns the GPU that CUDA calls `device` ("cuda:0") in a process of this environment.

        Raises UnknownDeviceError, HiddenDeviceError, or UnsupportedDeviceError for a MIG instance.
        """
        ordinal = int(device.removeprefix("cuda:"))
        handles = self.handles()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            if ordinal >= len(handles):
                raise UnknownDeviceError(
                    f"device '{device}' does not exist; there are {len(handles)} GPUs"
                )
            return self._in_order(handles, ordinal)
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
        found = self._entry(handles, entries[ordinal]) if ordinal < len(entries) else None
        if found is None:
            raise HiddenDeviceError(
                f"device '{device}' does not exist, as CUDA_VISIBLE_DEVICES is '{visible}'; name "
                "the GPU there or use a lower number"
            )
        return found

    def _entry(self, handles: list[c_void_p], entry: str) -> c_void_p | None:
        if entry.startswith("MIG-"):
            raise UnsupportedDeviceError(
                f"CUDA_VISIBLE_DEVICES names {entry}, a part of a GPU; kvcached shares whole GPUs: "
                "disable MIG (nvidia-smi -mig 0) or name a GPU"
            )
        if entry.isdigit():
            index = int(entry)
            return self._in_order(handles, index) if index < len(handles) else None
        matches = [handle for handle in handles if self.uuid(handle).startswith(entry)]
        return matches[0] if len(matches) == 1 else None

    def _in_order(self, handles: list[c_void_p], index: int) -> c_void_p:
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if not by_bus and len({self.name(handle) for handle in handles}) > 1:
            raise BackendUnavailableError(
                "the machine's GPUs differ, and CUDA numbers the fastest first: set "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID for all processes, or name UUIDs in "
                "CUDA_VISIBLE_DEVICES"
            )
        return handles[index]


@lru_cache(maxsize=8)
def _loaded(path: str, _pid: int) -> Nvml:
    return Nvml(path)


def load() -> Nvml:
    """Returns the library, loaded once per process.

    Raises NoDriverError, BackendUnavailableError.
    """
    return _loaded(os.environ.get("KVCACHED_LIBNVML") or _DEFAULT_PATH, os.getpid())
