"""Installation of the pools of hybrid models in SGLang, for which it does not ask the platform."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.platforms import current_platform

from kvcached.engines.sglang.hybrid import corrections
from kvcached.engines.sglang.hybrid.states import StateRows
from kvcached.engines.sglang.hybrid.torch_attention import TorchAttention
from kvcached.engines.sglang.hybrid.windows import KvcachedWindowAllocator
from kvcached.engines.sglang.platform import NativeCpuPlatform


def install() -> None:
    """Replaces SGLang's classes. Idempotent."""
    kv_cache_configurator.SWATokenToKVPoolAllocator = KvcachedWindowAllocator
    kv_cache_configurator.HybridReqToTokenPool = StateRows
    corrections.install()
    ATTENTION_BACKENDS["torch_native"] = TorchAttention
    ATTENTION_BACKENDS["triton"] = _triton_attention
    if isinstance(current_platform, NativeCpuPlatform):
        ATTENTION_BACKENDS["triton"] = TorchAttention  # some models accept only such names
        from kvcached.engines.sglang.hybrid import torch_kernels

        torch_kernels.install()


def _triton_attention(model_runner: Any) -> Any:
    from kvcached.engines.sglang.hybrid.triton_attention import TritonAttention

    return TritonAttention(model_runner)
