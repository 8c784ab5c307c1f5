"""The out-of-tree SGLang platform that runs every path natively on a CPU.

SGLang finds it by the entry point `sglang.srt.platforms` = `prism_cpu` when the environment says
SGLANG_PLATFORM=prism_cpu. `platform_cuda.py` has its place on GPUs.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from prism.engines.sglang.memory import EngineMemory


def activate() -> str:
    """The entry point: the dotted path of the platform class for this machine."""
    return f"{__name__}.PrismCpuPlatform"


class KvcachedPlatform:
    """What a platform needs to have SGLang's KV memory from kvcached: first among its bases."""

    memory: EngineMemory | None = None

    def get_kv_pool_cls(self, *, kind: str) -> type[Any] | None:
        """None is SGLang's own pool; `host.build` refuses a model that got one."""
        from prism.engines.sglang.kv_pool import KvcachedLatentPool, KvcachedPool

        return {"mha": KvcachedPool, "mla": KvcachedLatentPool}.get(kind)

    def get_paged_allocator_cls(self) -> type[Any]:
        from prism.engines.sglang.allocator import KvcachedAllocator

        return KvcachedAllocator


class PrismCpuPlatform(KvcachedPlatform, CpuSRTPlatform):  # type: ignore[misc]
    """CPU device; KV memory from kvcached. Out of tree, so that no compiled kernel is needed."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"
