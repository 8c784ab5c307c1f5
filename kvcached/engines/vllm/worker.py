"""vLLM's worker with its KV cache in kvcached's pages.

With a layout of vLLM that keeps all layers of a block together, the KV cache is a single run of
blocks, whatever the layers store. Where layers keep different tokens, vLLM divides them into
groups that share the ids of blocks. A block then holds the layers of one group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.worker.worker_base import WorkerBase

from kvcached import KVCache
from kvcached.engines.packed import ServedZeros, packed_tensor, replaced
from kvcached.engines.vllm import corrections, states
from kvcached.engines.vllm.memory import open_memory
from kvcached.layouts import KVLayout

# Layers that keep K and V heads, a latent, or a state. Subclasses keep something else.
_SPECS = (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


class ElasticWorker(WorkerBase):  # type: ignore[misc]
    """First base of a worker in the scheduler's process, before vLLM's own for a device."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        corrections.install()
        self._memory = open_memory(vllm_config, self.rank)
        self._layout: KVLayout | None = None
        self._request_tokens = 0  # of blocks that a request of full length takes

    @abstractmethod
    def warm_up(self) -> None:
        """Runs the model once, before there is KV."""

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Returns vLLM's specs with kvcached's stride.

        Raises NotImplementedError for layers that keep anything other than K and V, latents, or a
        state.
        """
        found = super().get_kv_cache_spec()
        specs = {name: states.without_exports(spec) for name, spec in found.items()}
        for name, spec in specs.items():
            if type(spec) not in _SPECS:
                raise NotImplementedError(
                    f"the attention of layer {name} ({get_kv_cache_spec_kind(spec)}) does not have "
                    "a layout on kvcached: serve a model whose layers have attention with K and V "
                    "(MHA, GQA or MQA), latents (MLA) or states, or unset KVCACHED_DEVICE"
                )
        if not specs:
            raise NotImplementedError("a model without KV layers is not supported on kvcached")
        self._layout = layout = self._lay_out(specs)
        stride_bytes = layout.buffer_token_bytes[0] * layout.block_tokens
        return {n: replace(s, block_stride_alignment=stride_bytes) for n, s in specs.items()}

    def _lay_out(self, specs: dict[str, Any]) -> KVLayout:
        """Returns the layout of blocks for the groups of layers that vLLM is going to form."""
        (blocks_first,) = self.get_supported_kv_cache_layouts()
        with replaced(self.cache_config, "kv_cache_layout", blocks_first):
            groups = get_kv_cache_groups(self.vllm_config, dict(specs))
        kept = [group.kv_cache_spec for group in groups]
        block_bytes = max(sum(specs[n].page_size_bytes for n in g.layer_names) for g in groups)
        blocks = sum(
            -(-spec.max_memory_usage_bytes(self.vllm_config) // spec.page_size_bytes)
            for spec in kept
        )
        block_tokens = self.cache_config.block_size
        self._request_tokens = blocks * block_tokens
        block_bytes = -(-block_bytes // block_tokens) * block_tokens
        layout: KVLayout = self._memory.layout(block_bytes, block_tokens)
        return layout

    def determine_available_memory(self) -> int:
        """Returns a size of addresses in whole slabs: the user's limit, or the whole device.

        One request of full length always fits into it. Whether there is memory for that request is
        checked when it is guaranteed.
        """
        self.warm_up()
        layout, page_bytes = self._laid_out(), self._memory.share.device.page_bytes
        need_bytes = layout.need_bytes(self._request_tokens, page_bytes)
        size_bytes = max(int(self.cache_config.kv_cache_memory_bytes), need_bytes)
        slab_bytes = layout.quantum_bytes(page_bytes)
        return -(-size_bytes // slab_bytes) * slab_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        blocks, layout = kv_cache_config.num_blocks, self._laid_out()
        stride_bytes = layout.buffer_token_bytes[0] * layout.block_tokens
        tensors = kv_cache_config.kv_cache_tensors
        if {tensor.block_stride for tensor in tensors} != {stride_bytes}:
            raise NotImplementedError(f"vLLM did not use kvcached's block layout: {tensors}")
        kv = self._memory.alloc_kvcache(layout, blocks * layout.block_tokens, self._request_tokens)
        super().initialize_from_config(kv_cache_config)
        self._check_tensors(kv, blocks * stride_bytes)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag != "kv_cache" or self._memory.kv is None:
            return nullcontext()
        return ServedZeros(packed_tensor(self._memory.kv))

    def _laid_out(self) -> KVLayout:
        if self._layout is None:
            raise RuntimeError("vLLM has not called get_kv_cache_spec yet")
        return self._layout

    def _check_tensors(self, kv: KVCache, size_bytes: int) -> None:
        """Raises RuntimeError if a layer's K and V are not in kvcached's memory."""
        start = packed_tensor(kv).data_ptr()
        for cache in self.model_runner.kv_caches:
            if not start <= cache.data_ptr() < start + size_bytes:
                raise RuntimeError("vLLM allocated a KV cache outside of kvcached's memory")


def renumber(plan: Any, own: Callable[[tuple[list[int], ...]], tuple[list[int], ...]]) -> None:
    """Replaces the ids of blocks in the plan of a step. `own` gets those of each group."""
    for request in plan.scheduled_new_reqs:
        request.block_ids = own(request.block_ids)
    cached = plan.scheduled_cached_reqs
    cached.new_block_ids = [
        None if groups is None else own(groups) for groups in cached.new_block_ids
    ]
    if plan.new_block_ids_to_zero:
        (plan.new_block_ids_to_zero,) = own((plan.new_block_ids_to_zero,))
