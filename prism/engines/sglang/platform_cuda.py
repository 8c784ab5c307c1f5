"""SGLang's CUDA platform with KV memory from kvcached. Not run on a GPU yet: see
docs/decisions/113-cuda-platform.md.

It stays SGLang's own in all else: the enumeration, the capabilities (CUDA graphs, Triton), the
dispatch key and with it the compiled kernels, the choice of the attention backend.
"""

from __future__ import annotations

from sglang.srt.platforms.cuda import CudaSRTPlatform

from prism.engines.sglang.platform import KvcachedPlatform


def activate() -> str:
    """The entry point: the dotted path of the platform class for a machine with a GPU."""
    return f"{__name__}.PrismCudaPlatform"


class PrismCudaPlatform(KvcachedPlatform, CudaSRTPlatform):  # type: ignore[misc]
    """Pools and allocators from kvcached; the rest is SGLang's."""
