"""Parts of transformers that the adapter relies on."""

from __future__ import annotations

import functools
import warnings

import transformers

from kvcached.engines.contract import Contract

_BATCHES = "transformers.generation.continuous_batching"
_CACHE = f"{_BATCHES}.cache:PagedAttentionCache"
_POOL = f"{_BATCHES}.cache_allocators:CachePool"
_ALLOCATOR = f"{_BATCHES}.cache_allocators:CacheAllocator"

CACHE = Contract(
    engine="transformers",
    versions=("5.19.0",),
    calls={
        "transformers.cache_utils:Cache.__init__": ("layers",),
        "transformers.cache_utils:Cache.update": ("key_states", "value_states", "layer_idx"),
        "transformers.cache_utils:CacheLayerMixin.update": ("key_states", "value_states"),
        "transformers.cache_utils:CacheLayerMixin.get_mask_sizes": ("query_length",),
        "transformers.cache_utils:CacheLayerMixin.get_seq_length": ("self",),
    },
    attributes=("transformers:PreTrainedConfig.get_text_config",),
)

CONTINUOUS = Contract(
    engine="transformers",
    versions=("5.19.0",),
    calls={
        f"{_CACHE}.__init__": ("config", "continuous_batching_config", "distributed_helper"),
        f"{_CACHE}.can_store_request_tokens": ("state", "request_len", "dry_run"),
        f"{_CACHE}.count_storable_requests": ("list_blocks_needed",),
        f"{_CACHE}.prepare_fork_request": ("src_state", "dst_req_ids", "copy_src_and_dst"),
        f"{_CACHE}.compute_free_capacity": ("relative",),
        f"{_CACHE}.evict_cached_blocks": ("self",),
        f"{_BATCHES}.cache:PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors": (
            "self",
        ),
        f"{_BATCHES}.cache:PagedAttentionMemoryHandler.__init__": ("bytes_per_sector",),
        f"{_POOL}.__init__": ("num_sectors", "num_allocators"),
        f"{_POOL}.allocate_sector": ("index",),
        f"{_POOL}.free_blocks": ("index", "block_ids"),
        f"{_POOL}.try_to_free_sectors": ("self",),
        f"{_POOL}.reset": ("self",),
        f"{_ALLOCATOR}.needs_new_blocks": ("request_id", "past_length", "query_length"),
        f"{_ALLOCATOR}.needs_new_sectors": ("request_id", "past_length", "query_length"),
        f"{_ALLOCATOR}.count_non_shareable_blocks": ("source_request_id", "past_length"),
        f"{_BATCHES}.continuous_api:ContinuousBatchProcessor.prepare_next_batch": ("self",),
    },
    attributes=(
        f"{_BATCHES}.continuous_api:PagedAttentionCache",
        f"{_BATCHES}.cache:CachePool",
        f"{_POOL}.num_free_sectors",
    ),
)


@functools.cache
def check(relied_on: Contract) -> None:
    """Checks a contract once per process. Warns about an untested version; raises RuntimeError."""
    relied_on.check(transformers.__version__, lambda text: warnings.warn(text, stacklevel=4))
