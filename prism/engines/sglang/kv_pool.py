"""SGLang's KV pools over kvcached memory: the same tensors, backed by pages only where used.

Slot 0 lies in the padding block, whose pages are always mapped; every other slot may be touched
only while its block is allocated.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from prism.engines.sglang.memory import active_memory


class KvcachedPool(MHATokenToKVPool):  # type: ignore[misc]
    """K and V of each layer are views of kvcached's ranges, shape (tokens, heads, head_dim)."""

    def _create_buffers_normal(self) -> None:
        kv = active_memory().kv
        rows, shape = self.size + self.page_size, (self.head_num, self.head_dim)
        layers = range(self.layer_num)
        self.k_buffer = [_tensor(kv.k_buffer(i), rows, shape, self.store_dtype) for i in layers]
        self.v_buffer = [_tensor(kv.v_buffer(i), rows, shape, self.store_dtype) for i in layers]


class KvcachedLatentPool(MLATokenToKVPool):  # type: ignore[misc]
    """One view a layer, shape (tokens, 1, kv_lora_rank + rope_dim): multi-head latent attention.

    Models of that kind are refused before they get here (`prism/model_spec.py`): SGLang's CPU
    attention cannot run them. REQUIRES: the active memory's layout is an `MLALayout`.
    """

    def _create_buffers(self) -> None:
        kv = active_memory().kv
        rows, shape = self.size + self.page_size, (1, self.kv_cache_dim)
        layers = range(self.layer_num)
        self.kv_buffer = [
            _tensor(kv.buffer(i, "latent"), rows, shape, self.store_dtype) for i in layers
        ]


def _tensor(buffer: object, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_dlpack(buffer)
    if tensor.dtype != dtype or tuple(tensor.shape[1:]) != shape:
        raise RuntimeError(
            f"KV layout mismatch: SGLang wants {shape} of {dtype}, the model's "
            f"specification says {tuple(tensor.shape[1:])} of {tensor.dtype}"
        )
    if tensor.shape[0] < rows:
        raise RuntimeError(f"KV space of {tensor.shape[0]} tokens is short of {rows}")
    return tensor[:rows]
