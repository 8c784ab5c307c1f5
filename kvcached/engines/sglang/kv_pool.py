"""SGLang's KV pool in kvcached memory: the same tensors, backed by pages only where used.

Slot 0 is in the padding block, whose pages are always mapped. Any other slot may be accessed only
while its block is allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvcached import KVCache, Layout
from kvcached.engines.sglang.memory import active_memory


class KvcachedPool(MHATokenToKVPool):  # type: ignore[misc]
    """SGLang's MHA pool. K and V of each layer are views of kvcached: (tokens, heads, head_dim)."""

    kv: KVCache | None = None
    size: int

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout != "nhd":
            raise NotImplementedError(
                f"kvcached supports SGLang's KV layout nhd, not {self.kv_cache_layout}; unset the "
                "option that chose it"
            )
        self.kv = kv = active_memory().kv_cache(self._layout(), self.size + self.page_size)
        self.size = kv.num_tokens - self.page_size  # whole slabs: any of their blocks may be used
        layers = range(self.layer_num)
        self.k_buffer = [torch.from_dlpack(kv.k_buffer(i)) for i in layers]
        self.v_buffer = [torch.from_dlpack(kv.v_buffer(i)) for i in layers]

    def _layout(self) -> Layout:
        return Layout(
            num_layers=self.layer_num,
            num_kv_heads=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=None if self.v_head_dim == self.head_dim else self.v_head_dim,
            dtype=str(self.store_dtype).removeprefix("torch."),
            block_tokens=self.page_size,
        )


def pool_bytes(self: Any, pre_model_load_memory: int) -> int:
    """Replaces KVCacheConfigurator._profile_available_bytes.

    Raises NotImplementedError before SGLang allocates memory for latent attention.
    """
    if self.use_mla_backend:
        raise NotImplementedError(
            "latent attention (MLA) is not supported on kvcached by this version: serve a model "
            "whose layers have K and V (MHA, GQA or MQA)"
        )
    return active_memory().pool_bytes(int(self.model_config.context_len))
