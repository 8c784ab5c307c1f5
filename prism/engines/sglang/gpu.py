"""What is different on a GPU. Written after SGLang's sources and CUDA's documents, not run yet."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

CUDA = "cuda"
PLATFORM_ENTRY_POINT = "prism_cuda"

# Import names of what SGLang's CUDA path needs beside the wheel: its kernels, and Triton.
_NEEDS = ("sgl_kernel", "triton")


def is_gpu(device: str) -> bool:
    return device.startswith(f"{CUDA}:")


def index_of(device: str) -> int:
    """N of "cuda:N"."""
    return int(device.partition(":")[2])


def lacks(device: str) -> str:
    """What keeps this installation from serving on `device`; "" if nothing does."""
    missing = [name for name in _NEEDS if is_gpu(device) and find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"{device} needs SGLang's CUDA kernels, and {', '.join(missing)} cannot be imported:"
        " install prism-serving[sglang-cuda], or use host:0"
    )


def prepare(device: str) -> None:
    """Choose the platform. REQUIRES: sglang is not imported yet.

    The nursery imports and then forks, which CUDA allows only as long as it is not initialised:
    asking for GPUs goes through NVML instead.
    """
    if is_gpu(device):
        os.environ["SGLANG_PLATFORM"] = PLATFORM_ENTRY_POINT
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def adopt(client: Any, device: str, static_bytes: int) -> None:
    """In the engine's process, before a model is built: torch works on the device, its own
    allocations (activations, workspaces, graphs) stay within the leased share, and pages wait for
    the stream that SGLang computes on. Idempotent; nothing on a host device."""
    if not is_gpu(device):
        return
    import torch

    index = index_of(device)
    torch.cuda.set_device(index)
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, static_bytes / total_bytes), index)
    client.set_streams([torch.cuda.current_stream(index).cuda_stream])
