"""Compiles SGLang's attention kernels for an H200 with the Triton that is installed, runs nothing.

SGLang 0.5.23 is written for a newer Triton than the reference GPU image has. A compiler needs no
GPU. Prints the name of each kernel, or the compiler's error.
"""

from __future__ import annotations

import importlib
from typing import Any

from claimed_cuda import claim

REQUESTS, TOKENS, SPLITS, BLOCK = 4, 64, 8, 16


def compile_only() -> None:
    """Calls of kernels compile, and stop before the launch."""
    jit = importlib.import_module("triton.runtime.jit")
    run = jit.JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"], self.__name__
        print(f"compiled {self.__name__}", flush=True)
        return kernel

    jit.JITFunction.run = compiled


def attend(heads: int, kv_heads: int, width: int) -> None:
    """Runs a prefill and a decode step with a prefix, as the Triton backend calls them."""
    import torch

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    def ids(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    extend = importlib.import_module("sglang.kernels.ops.attention.extend_attention")
    decode = importlib.import_module("sglang.kernels.ops.attention.decode_attention")
    queries, keys = half(TOKENS, heads, width), half(TOKENS, kv_heads, width)
    pool = half(1024, kv_heads, width)
    rows, indices = ids(REQUESTS + 1), ids(256, torch.int64)
    tail = (None, True, None, 16, 1.0, 1.0)
    extend.extend_attention_fwd(
        *(queries, keys, keys, queries.clone(), pool, pool, rows, rows, indices, *tail),
        sm_scale=0.1,
        page_size=BLOCK,
    )
    logits = torch.zeros(REQUESTS, heads, SPLITS, width)
    sums = torch.zeros(REQUESTS, heads, SPLITS)
    queries = half(REQUESTS, heads, width)
    scales = (0.1, 1.0, 1.0)
    decode.decode_attention_fwd(
        *(queries, pool, pool, queries.clone(), rows, indices, logits, sums),
        *(ids(REQUESTS), SPLITS, *scales),
        page_size=BLOCK,
    )


if __name__ == "__main__":
    claim()
    compile_only()
    for shape in ((8, 8, 64), (16, 8, 128), (32, 8, 128)):
        attend(*shape)
