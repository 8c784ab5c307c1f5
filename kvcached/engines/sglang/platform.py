"""Base of SGLang platforms whose KV memory is kvcached's."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from kvcached.engines.sglang.memory import PoolMemory


def bind_threads(ranks: int) -> None:
    """Sets each rank's cores. Without this setting SGLang fails with more ranks than NUMA nodes."""
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)


class KvcachedPlatform:
    """First base of a platform. `memory` is set before SGLang lays out a pool."""

    memory: PoolMemory | None = None

    def get_kv_pool_cls(self, *, kind: str) -> type[Any] | None:
        """Returns the pool's class. None selects SGLang's own pool, which KvcachedAllocator
        refuses.
        """
        from kvcached.engines.sglang.kv_pool import KvcachedLatentPool, KvcachedPool

        return {"mha": KvcachedPool, "mla": KvcachedLatentPool}.get(kind)

    def get_paged_allocator_cls(self) -> type[Any]:
        from kvcached.engines.sglang.allocator import KvcachedAllocator

        return KvcachedAllocator


class NativeCpuPlatform(KvcachedPlatform, CpuSRTPlatform):  # type: ignore[misc]
    """Platform with native CPU code on every path.

    It is out of tree (OOT), so that no compiled kernel is needed.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"
