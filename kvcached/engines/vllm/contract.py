"""What the adapter relies on in vLLM, looked at where its version is not one that was tested.

A version that differs shall be refused at the start, with what differs, and not fail while it
serves.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import fields
from typing import Any

# Callables that are called or replaced, with the parameters that are passed to them by name or
# that the adapter looks at; and attributes, which need only be there.
_CALLS = {
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config": ("vllm_config",),
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop": ("self",),
    "vllm.v1.engine.core:EngineCore.step": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": ("self",),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": (
        "apply_admission_cap",
    ),
    "vllm.v1.core.block_pool:BlockPool.__init__": ("num_gpu_blocks", "enable_caching"),
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": ("num_blocks",),
    "vllm.v1.core.block_pool:BlockPool.free_blocks": ("ordered_blocks",),
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": ("block_ids",),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": ("self",),
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": ("self",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n": ("blocks",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n": ("n",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove": ("block",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.get_all_free_blocks": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.load_model": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.get_kv_cache_spec": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.get_supported_kv_cache_layouts": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory": ("self",),
    "vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config": ("kv_cache_config",),
    "vllm.v1.worker.cpu_worker:CPUWorker._maybe_get_memory_pool_context": ("tag",),
    "vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model": ("self",),
}
_ATTRIBUTES = (
    "vllm.v1.engine:EngineCoreRequestType.WAKEUP",
    "vllm.v1.kv_cache_layout:KVCacheLayout.BLHNC",
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_kind",
    "vllm.v1.core.kv_cache_coordinator:BlockPool",
    "vllm.model_executor.model_loader.base_loader:process_weights_after_loading",
)
_FIELDS = {
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_stride_alignment", "sliding_window"),
    "vllm.v1.kv_cache_interface:KVCacheTensor": ("block_stride",),
}


def check_contract() -> None:
    """Raises RuntimeError, which names each part that this vLLM lacks."""
    lacks = [path for path in _ATTRIBUTES if _find(path) is None]
    for path, parameters in _CALLS.items():
        known = _parameters(_find(path))
        lacks += [f"{path}({name})" for name in parameters if name not in known]
    for path, names in _FIELDS.items():
        found = _find(path)
        known = set() if found is None else {field.name for field in fields(found)}
        lacks += [f"{path}.{name}" for name in names if name not in known]
    lacks += _queue_differs()
    if lacks:
        raise RuntimeError(
            f"this version of vLLM lacks what kvcached relies on ({', '.join(lacks)}): install one "
            "that was tested, or unset KVCACHED_DEVICE"
        )


def _queue_differs() -> list[str]:
    """Blocks that are put in front of the queue of free ones come first, in their order."""
    try:
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

        blocks = [KVCacheBlock(number) for number in range(4)]
        queue = FreeKVCacheBlockQueue(blocks[:2])
        queue.prepend_n(blocks[2:])
        queue.remove(blocks[0])
        first = queue.fake_free_list_head.next_free_block
        same = [block.block_id for block in queue.get_all_free_blocks()] == [2, 3, 1]
    except (ImportError, AttributeError, TypeError) as error:
        return [f"FreeKVCacheBlockQueue: {error}"]
    good = same and first is blocks[2] and first.block_hash is None
    return [] if good else ["FreeKVCacheBlockQueue in the order of 0.32"]


def _find(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _parameters(found: Any) -> set[str]:
    if found is None:
        return set()
    function = inspect.unwrap(getattr(found, "__func__", found))
    return set(inspect.signature(function).parameters)
