"""Parts of vLLM that the adapter relies on."""

from __future__ import annotations

from kvcached.engines.contract import Contract


def _queue_differs() -> list[str]:
    """Checks that blocks put at the head of the free queue come first, in their order."""
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


# Callables of the worker of a kind of device, and of its platform.
_WORKERS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config": ("vllm_config",),
        "vllm.v1.worker.cpu_worker:CPUWorker.load_model": ("self",),
        "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory": ("self",),
        "vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model": ("self",),
    },
    "cuda": {
        "vllm.platforms.cuda:CudaPlatform.check_and_update_config": ("vllm_config",),
        "vllm.platforms.cuda:CudaPlatform.visible_device_id_to_physical_device_id": ("device_id",),
        "vllm.v1.worker.gpu_worker:Worker.init_device": ("self",),
        "vllm.v1.worker.gpu_worker:Worker.load_model": ("self",),
        "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": ("self",),
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ("self",),
        "vllm.v1.worker.gpu_worker:Worker.execute_model": ("scheduler_output",),
        "vllm.v1.worker.gpu_worker:request_memory": ("init_snapshot", "cache_config"),
    },
}
_CALLS: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop": ("self",),
    "vllm.v1.engine.core:EngineCore.step": ("self",),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": ("self",),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": (
        "apply_admission_cap",
    ),
    "vllm.v1.core.kv_cache_utils:get_kv_cache_groups": ("vllm_config", "kv_cache_spec"),
    "vllm.v1.kv_cache_interface:KVCacheSpec.max_memory_usage_bytes": ("vllm_config",),
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
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core": (
        "mixed_qkv",
        "b",
        "a",
        "core_attn_out",
        "layer_name",
    ),
    "vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d:causal_conv1d_fn_cpu": (
        "conv_states",
        "query_start_loc",
        "cache_indices",
        "has_initial_state",
        "activation",
    ),
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu": (
        "positions",
        "query",
        "key",
    ),
    "vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter._compute_routing": (
        "router_logits",
    ),
    "vllm.model_executor.models.gemma3n:Gemma3nForCausalLM.forward": ("per_layer_inputs",),
    "vllm.model_executor.models.gemma3n:Gemma3nTextModel.get_per_layer_input_embeddings": (
        "input_ids",
    ),
    "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.get_supported_kv_cache_layouts": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": ("kv_cache_config",),
    "vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context": ("tag",),
}
_ATTRIBUTES = {
    "cpu": (
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_MLA",
        "vllm.model_executor.model_loader.base_loader:process_weights_after_loading",
    ),
    "cuda": (
        "vllm.model_executor.model_loader.weight_utils:download_weights_from_hf",
        "vllm.utils.torch_utils:current_stream",
    ),
}


def contract(kind: str) -> Contract:
    """Returns the contract with vLLM on a kind of device: "cpu" or "cuda"."""
    return Contract(
        engine="vLLM",
        versions=("0.32.0",),
        calls=_WORKERS[kind] | _CALLS,
        attributes=(
            *_ATTRIBUTES[kind],
            "vllm.model_executor.models.commandr:Attention",
            "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec",
            "vllm.v1.engine:EngineCoreRequestType.WAKEUP",
            "vllm.v1.kv_cache_layout:KVCacheLayout.BLHNC",
            "vllm.v1.kv_cache_interface:get_kv_cache_spec_kind",
            "vllm.v1.kv_cache_interface:MLAAttentionSpec",
            "vllm.v1.kv_cache_interface:SlidingWindowSpec",
            "vllm.v1.core.kv_cache_coordinator:BlockPool",
        ),
        fields={
            "vllm.v1.kv_cache_interface:FullAttentionSpec": (
                "block_stride_alignment",
                "sliding_window",
            ),
            "vllm.v1.kv_cache_interface:KVCacheTensor": ("block_stride",),
            "vllm.v1.kv_cache_interface:MambaSpec": (
                "num_prefill_checkpoint_blocks",
                "prefill_checkpoint_alignment",
            ),
        },
        behaviours=(_queue_differs,),
    )
