"""SGLang's KV pool over kvcached memory: the same tensors, backed by pages only where used."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from prism.engines.sglang.memory import active_memory


class KvcachedPool(MHATokenToKVPool):  # type: ignore[misc]
    """K and V of each layer are views of kvcached's ranges, shape (tokens, heads, head_dim).

    Slot 0 lies in the padding block, whose pages are always mapped; every other slot may be
    touched only while its block is allocated.
    """

    def _create_buffers_normal(self) -> None:
        kv = active_memory().kv
        rows = self.size + self.page_size
        self.k_buffer = [self._tensor(kv.k_buffer(i), rows) for i in range(self.layer_num)]
        self.v_buffer = [self._tensor(kv.v_buffer(i), rows) for i in range(self.layer_num)]

    def _tensor(self, buffer: object, rows: int) -> torch.Tensor:
        tensor = torch.from_dlpack(buffer)
        shape = (self.head_num, self.head_dim)
        if tensor.dtype != self.store_dtype or tuple(tensor.shape[1:]) != shape:
            raise RuntimeError(
                f"KV layout mismatch: SGLang wants {shape} of {self.store_dtype}, the model's "
                f"specification says {tuple(tensor.shape[1:])} of {tensor.dtype}"
            )
        if tensor.shape[0] < rows:
            raise RuntimeError(f"KV space of {tensor.shape[0]} tokens is short of {rows}")
        return tensor[:rows]
