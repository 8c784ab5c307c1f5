"""SGLang's KV pool in kvcached memory: the same tensors, backed by pages only where used.

Slot 0 is in the padding block, whose pages are always mapped. Any other slot may be accessed only
while its block is allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.runtime_context import get_schedule, get_server_args

from kvcached import KVCache, Layout, MLALayout
from kvcached.engines.sglang.memory import Pool, active_memory

_WINDOW_LABEL = "SWA"  # SGLang's name of the pool of layers with a window


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
        pool: Pool = "window" if self.allocation_label == _WINDOW_LABEL else "full"
        self.kv = kv = active_memory().kv_cache(self._layout(), self.size + self.page_size, pool)
        self.size = kv.num_tokens - self.page_size  # whole slabs: any of their blocks may be used
        layers = range(self.layer_num)
        self.k_buffer = [_stored(self, kv.k_buffer(i)) for i in layers]
        self.v_buffer = [_stored(self, kv.v_buffer(i)) for i in layers]

    def _layout(self) -> Layout:
        return Layout(
            num_layers=self.layer_num,
            num_kv_heads=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=None if self.v_head_dim == self.head_dim else self.v_head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            block_tokens=self.page_size,
        )


class KvcachedLatentPool(MLATokenToKVPool):  # type: ignore[misc]
    """SGLang's pool of latent attention (MLA). The latents of each layer are a view of kvcached:
    (tokens, 1, kv_lora_rank + rope_dim).
    """

    kv: KVCache | None = None
    size: int

    def _create_buffers(self) -> None:
        if self.store_dtype != self.dtype and torch.device(self.device).type != "cpu":
            check_fp8_attention(attention_backends_of(resolved_view(get_server_args())))
        layout = MLALayout(
            num_layers=self.layer_num,
            kv_lora_rank=self.kv_lora_rank,
            rope_dim=self.qk_rope_head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            block_tokens=self.page_size,
        )
        self.kv = kv = active_memory().kv_cache(layout, self.size + self.page_size)
        self.size = kv.num_tokens - self.page_size
        layers = range(self.layer_num)
        self.kv_buffer = [_stored(self, kv.buffer(i, "latent")) for i in layers]
        if torch.device(self.device).type == "cpu":
            AttentionBackendRegistry.register("torch_native", _attend_to_latents)


def check_fp8_attention(backends: tuple[str, ...]) -> None:
    """Raises NotImplementedError for attention that does not read FP8 latents by Triton. Others
    convert the whole pool first, of which pages without KV cannot be read."""
    if set(backends) != {"triton"}:
        raise NotImplementedError(
            f"attention by {' and '.join(sorted(set(backends)))} on FP8 latents is not supported on"
            " kvcached: set --attention-backend triton, or leave out --kv-cache-dtype"
        )


def _stored(pool: Any, view: Any) -> torch.Tensor:
    """Returns a view of kvcached in SGLang's type of storage: bytes for an FP8 cache."""
    return torch.from_dlpack(view).view(pool.store_dtype)


def _attend_to_latents(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """Returns attention on latents (DeepSeek-V2, §2.1.3), for prefills as well. SGLang's attention
    on whole heads reads the cache by a Triton kernel, which a CPU lacks."""
    return AttnForwardMethod.MLA


def pool_bytes(self: Any, pre_model_load_memory: int) -> int:
    """Replaces KVCacheConfigurator._profile_available_bytes."""
    context_tokens = int(self.model_config.context_len)
    chunk_tokens = int(get_schedule().chunked_prefill_size or context_tokens)
    window_tokens = int(self.sliding_window_size or 0) + 1  # SGLang counts those before a token
    # SGLang keeps the window before an answer until it is as long as a window, and frees whole
    # blocks but the one before the window.
    kept_tokens = window_tokens + max(window_tokens, chunk_tokens) + 2 * self.page_size
    return active_memory().pool_bytes(context_tokens, kept_tokens)
