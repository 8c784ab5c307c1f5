"""SGLang's KV pool over kvcached memory: the same tensors, backed by pages only where used.

Slot 0 lies in the padding block, whose pages are always mapped; every other slot may be touched
only while its block is allocated. SGLang lays out as many tokens as the plan says, whatever is free
at the moment: memory here is address space that the ledger backs page by page. SGLang's own measure
would cap a model for its whole life at what its neighbours left when it came up.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from prism.engines.sglang.memory import MemoryPlan, active_memory

_AMPLE = 8  # SGLang's bytes of a token differ from ours; `max_total_tokens` bounds what it lays out


class KvcachedPool(MHATokenToKVPool):  # type: ignore[misc]
    """K and V of each layer are views of kvcached's ranges, shape (tokens, heads, head_dim)."""

    def _create_buffers_normal(self) -> None:
        kv = active_memory().kv
        rows, shape = self.size + self.page_size, (self.head_num, self.head_dim)
        layers = range(self.layer_num)
        self.k_buffer = [_tensor(kv.k_buffer(i), rows, shape, self.store_dtype) for i in layers]
        self.v_buffer = [_tensor(kv.v_buffer(i), rows, shape, self.store_dtype) for i in layers]


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


def install() -> None:
    """Replace SGLang's measurement by the plan. Idempotent."""
    KVCacheConfigurator._profile_available_bytes = _planned_bytes


def _planned_bytes(self: Any, pre_model_load_memory: int) -> int:
    """More than the plan's tokens need, so that the token limit alone decides."""
    plan = active_memory().plan
    return _AMPLE * plan.virtual_tokens * plan.layout.token_bytes


def check(pool: Any, plan: MemoryPlan) -> None:
    """Raises NotImplementedError unless SGLang counts on the tokens of the plan: block ids beyond
    its own number would be indices out of range."""
    if pool.size != plan.pool_tokens:
        raise NotImplementedError(
            f"SGLang laid out {pool.size} tokens of KV where {plan.pool_tokens} were planned: this"
            " model's KV cache is not supported by this version"
        )
