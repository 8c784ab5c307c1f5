"""The out-of-tree SGLang platform that runs every path natively on a CPU.

SGLang finds it by the entry point `sglang.srt.platforms` = `prism_cpu` when the environment says
SGLANG_PLATFORM=prism_cpu. `platform_cuda.py` has its place on GPUs.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from prism.engines.sglang.memory import EngineMemory


def activate() -> str | None:
    """The entry point: the dotted path of the platform class for engines on a CPU."""
    return chosen("prism_cpu", f"{__name__}.PrismCpuPlatform")


def chosen(entry_point: str, platform: str) -> str | None:
    """`platform` if SGLANG_PLATFORM asks for it. SGLang activates every plugin that does not
    answer None, and an SGLang beside Prism keeps its own platform."""
    return platform if os.environ.get("SGLANG_PLATFORM") == entry_point else None


class KvcachedPlatform:
    """What a platform needs to have SGLang's KV memory from kvcached: first among its bases."""

    memory: EngineMemory | None = None

    def get_kv_pool_cls(self, *, kind: str) -> type[Any] | None:
        """None is SGLang's own pool; `host.build` refuses a model that got one."""
        from prism.engines.sglang.kv_pool import KvcachedPool

        return KvcachedPool if kind == "mha" else None

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
