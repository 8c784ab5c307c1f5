"""Imports the modules named as arguments, in a torch that claims an H200.

For imports alone: computation is not possible. Prints one line for each module, or the traceback.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=139 << 30,
    multi_processor_count=132,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    L2_cache_size=60 << 20,
)


class Driver:
    """GPU properties that Triton reads when it is imported and when it compiles."""

    def get_current_target(self) -> Any:
        compiler = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


def claim() -> None:
    import torch
    from triton.runtime import driver

    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_, **__: (H200.major, H200.minor)
    cuda.get_device_name = lambda *_, **__: H200.name
    cuda.get_device_properties = lambda *_, **__: H200
    cuda.is_bf16_supported = lambda *_, **__: True
    driver.set_active(Driver())


if __name__ == "__main__":
    claim()
    from prism.engines.sglang.platform import stubs

    stubs.install()
    for module in sys.argv[1:]:
        importlib.import_module(module)
        print(f"imported {module}", flush=True)
    registry = importlib.import_module("sglang.srt.models.registry")
    print("models", *registry.ModelRegistry.models, flush=True)
