"""SGLang's CUDA platform with KV memory from kvcached (docs/decisions/113-cuda-platform.md).

The rest is SGLang's: the enumeration of devices, the capabilities (CUDA graphs, Triton), the
dispatch key and with it the compiled kernels, the choice of the attention backend.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cuda import CudaSRTPlatform

from kvcached.engines.sglang.platform import KvcachedPlatform


class PrismCudaPlatform(KvcachedPlatform, CudaSRTPlatform):  # type: ignore[misc]
    """CUDA platform with pools and allocators from kvcached and with graphs that are captured
    later; the rest is SGLang's."""

    def get_graph_runner_cls(self) -> type[Any]:
        from prism.engines.sglang.decode_graphs import LazyGraphRunner

        return LazyGraphRunner
