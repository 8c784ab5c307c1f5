"""torch._C's CUDA names on a CPU build of torch, over tests/torchcuda/front.

torch.cuda itself, with its rules of lazy initialisation, is torch's own Python.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import torch.version
import torchcuda_nccl
import torchcuda_streams
from torch import _C
from torchcuda_library import (
    CUDA,
    checked,
    current_device,
    current_stream,
    kernel_distance,
    library,
)
from torchcuda_streams import EventBase, GraphBase, StreamBase, graph_pool_handle

CUDA_VERSION = "13.0"
_COUNTERS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_SINGLE = ("num_ooms", "num_alloc_retries", "num_device_alloc", "num_device_free")


def install() -> None:
    """Adds the names to torch._C. REQUIRES: torch.cuda is not imported yet."""
    torch.version.cuda = CUDA_VERSION
    # Aten asks this for the flavour of a build.
    _C._has_cuda = True
    for name, value in _names().items():
        setattr(_C, name, value)
    sys.modules["torch._C._cudart"] = _C._cudart
    torchcuda_nccl.install()


def _names() -> dict[str, Any]:
    return {
        "_cuda_getDeviceCount": _device_count,
        "_cuda_init": _init,
        "_cuda_isInBadFork": lambda: bool(library.torchcuda_is_in_bad_fork()),
        "_cuda_getArchFlags": lambda: "sm_80 sm_90 sm_100",
        "_cuda_getDevice": current_device,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_synchronize": lambda: _C._accelerator_synchronizeDevice(current_device()),
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_ipc_collect": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_sleep": lambda cycles: library.torchcuda_sleep(),
        "_cuda_getCurrentStream": lambda device: (current_stream(device), device, CUDA),
        "_cuda_getDefaultStream": lambda device: (0, device, CUDA),
        "_cuda_getStreamFromExternal": lambda pointer, device: (pointer, device, CUDA),
        "_cuda_getCurrentRawStream": current_stream,
        "_cuda_setStream": _set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: bool(library.torchcuda_is_capturing()),
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_emptyCache": lambda *pool: _C._accelerator_emptyCache(),
        "_cuda_memoryStats": _memory_stats,
        "_cuda_memorySnapshot": lambda options: {"segments": [], "device_traces": []},
        "_cuda_resetPeakMemoryStats": _C._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_getMemoryFraction": _memory_fraction,
        "_cuda_setMemoryFraction": _set_memory_fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": lambda value: None,
        "_CudaDeviceProperties": DeviceProperties,
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CUDAGraph": GraphBase,
        "_graph_pool_handle": graph_pool_handle,
        "_cuda_CUDAAllocator": type("_cuda_CUDAAllocator", (), {}),
        "_cuda_customAllocator": _unsupported("custom allocators"),
        "_cuda_changeCurrentAllocator": _unsupported("custom allocators"),
        "_MemPool": type("_MemPool", (), {"__init__": _unsupported("MemPool")}),
        "_cuda_beginAllocateToPool": lambda device, pool: library.torchcuda_begin_pool(
            device, *pool
        ),
        "_cuda_beginAllocateCurrentThreadToPool": (
            lambda device, pool: library.torchcuda_begin_pool(device, *pool)
        ),
        "_cuda_endAllocateToPool": lambda device, pool: library.torchcuda_end_pool(device, *pool),
        "_cuda_releasePool": lambda device, pool: library.torchcuda_release_pool(device, *pool),
        "_cudart": _cudart(),
    }


def _unsupported(what: str) -> Any:
    def refuse(*_args: object, **_named: object) -> None:
        raise NotImplementedError(f"the double of torch's CUDA front has no {what}")

    return refuse


# --- kernels that are written in Python ---------------------------------------------------------


def host_view(tensor: Any) -> Any:
    """Returns a CPU tensor over the memory of a CUDA tensor, as kernels see it."""
    return flat_view(tensor).as_strided(tensor.shape, tensor.stride(), 0)


def flat_view(tensor: Any) -> Any:
    """Returns the items of the tensor's storage from its first one on, as kernels see them."""
    import torch

    size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if size <= 0:
        return torch.empty(0, dtype=tensor.dtype)
    view = (tensor.data_ptr() + kernel_distance()) & (2**64 - 1)
    raw = (ctypes.c_uint8 * size).from_address(view)
    return torch.frombuffer(raw, dtype=tensor.dtype, count=size // tensor.element_size())


def kernel(tensors: list[Any], run: Callable[[], None]) -> None:
    """Runs `run` now as a kernel on the current stream that may touch the tensors; in a capture
    it is kept for the replays instead."""
    device = tensors[0].device.index if tensors else current_device()
    ranges = [_range(tensor) for tensor in tensors if tensor.numel()]
    touched = (ctypes.c_uint64 * (3 * len(ranges)))(*itertools.chain.from_iterable(ranges))
    callback = _CALLBACK(run)
    if library.torchcuda_capture_kernel(device, callback, touched, len(ranges)):
        torchcuda_streams.keep(callback)
        return
    checked(library.torchcuda_start_kernel, device)
    run()
    checked(library.torchcuda_launch, device, touched, len(ranges))


_CALLBACK = ctypes.CFUNCTYPE(None)


def _range(tensor: Any) -> tuple[int, int, int]:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    holes = not library.torchcuda_is_allocated(ctypes.c_uint64(tensor.untyped_storage().data_ptr()))
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), int(holes)


# --- devices -----------------------------------------------------------------------------------


def _init() -> None:
    """Initialises CUDA at the first call that needs it."""
    import torch

    if library.torchcuda_device_count() <= 0:
        raise RuntimeError("No CUDA GPUs are available")
    library.torchcuda_lazy_init()
    torch.cuda._get_device_properties = _device_properties
    torch.cuda.default_generators = _default_generators()


def _default_generators() -> tuple[Any, ...]:
    count = library.torchcuda_device_count()
    with_gil = ctypes.PyDLL(os.environ["TORCHCUDA_FRONT"])
    with_gil.torchcuda_default_generator.restype = ctypes.py_object
    return tuple(with_gil.torchcuda_default_generator(index) for index in range(count))


def _device_count() -> int:
    return int(library.torchcuda_device_count())


def _set_device(device: int) -> None:
    import torch

    torch.cuda._lazy_init()
    _C._accelerator_setDeviceIndex(device)


def _exchange_device(device: int) -> int:
    if device < 0:
        return -1
    before = current_device()
    if before != device:
        _C._accelerator_setDeviceIndex(device)
    return before


def _set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
    _C._accelerator_setStream(
        _C.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    )


class DeviceProperties(NamedTuple):
    """Properties of an H100-like GPU that torch, SGLang and Triton read."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: UUID
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 1
    pci_device_id: int = 0
    pci_domain_id: int = 0
    clock_rate: int = 1980000
    memory_clock_rate: int = 2619000
    memory_bus_width: int = 5120
    gcnArchName: str = ""


def _device_properties(device: int) -> DeviceProperties:
    major, _, minor = os.environ.get("TORCHCUDA_CAPABILITY", "9.0").partition(".")
    _free, total = _mem_get_info(device)
    return DeviceProperties(
        _name_of(device), int(major), int(minor), total, 132, UUID(int=device + 1)
    )


def _name_of(device: int) -> str:
    libcuda = ctypes.CDLL(os.environ.get("KVCACHED_LIBCUDA", "libcuda.so.1"))
    text = ctypes.create_string_buffer(256)
    assert libcuda.cuDeviceGetName(text, len(text), device) == 0
    return text.value.decode()


# --- memory ------------------------------------------------------------------------------------


def _memory_stats(device: int) -> dict[str, Any]:
    numbers = (ctypes.c_int64 * (4 * len(_COUNTERS) + len(_SINGLE)))()
    library.torchcuda_usage(device, numbers)
    stats: dict[str, Any] = {}
    for i, counter in enumerate(_COUNTERS):
        current, peak, allocated, freed = numbers[4 * i : 4 * i + 4]
        values = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        none = dict.fromkeys(values, 0)
        stats[counter] = {"all": values, "small_pool": none, "large_pool": none}
    stats |= dict(zip(_SINGLE, numbers[4 * len(_COUNTERS) :], strict=True))
    return stats


def _memory_fraction(device: int) -> float:
    return float(library.torchcuda_memory_fraction(device))


def _set_memory_fraction(fraction: float, device: int) -> None:
    library.torchcuda_set_memory_fraction(device, fraction)


def _mem_get_info(device: int) -> tuple[int, int]:
    free, total = _C._accelerator_getMemoryInfo(device)
    return int(free), int(total)


class _CudaError(enum.IntEnum):
    success = 0


def _cudart() -> types.ModuleType:
    module = types.ModuleType("torch._C._cudart")
    module.cudaError = _CudaError  # type: ignore[attr-defined]
    module.cudaGetErrorString = lambda code: f"CUDA error {int(code)}"  # type: ignore[attr-defined]
    module.cudaMemGetInfo = _mem_get_info  # type: ignore[attr-defined]
    module.cudaProfilerStart = lambda: _CudaError.success  # type: ignore[attr-defined]
    module.cudaProfilerStop = lambda: _CudaError.success  # type: ignore[attr-defined]
    return module
