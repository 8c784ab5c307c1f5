"""Parts of SGLang that the adapter relies on."""

from __future__ import annotations

from kvcached.engines.contract import Contract

_PAGED = "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"
_MODELS = "sglang.srt.models"
_ATTENTION = f"{_MODELS}.deepseek_common"
_BUDGET = "sglang.srt.mem_cache.prefill_budget:PrefillBudget"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"

CONTRACT = Contract(
    engine="SGLang",
    versions=("0.5.23",),
    calls={
        "sglang.srt.platforms.interface:SRTPlatform.get_kv_pool_cls": ("kind",),
        "sglang.srt.platforms.interface:SRTPlatform.get_paged_allocator_cls": ("self",),
        "sglang.srt.platforms.interface:SRTPlatform.apply_server_args_defaults": ("server_args",),
        "sglang.srt.platforms.interface:SRTPlatform.post_load_model": ("model",),
        "sglang.srt.runtime_context:get_server_args": (),
        "sglang.srt.runtime_context:get_device": (),
        "sglang.srt.runtime_context:get_parallel": (),
        "sglang.srt.model_loader.weight_utils:download_weights_from_hf": (
            "model_name_or_path",
            "cache_dir",
            "allow_patterns",
            "revision",
        ),
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal": ("self",),
        "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool._create_buffers": ("self",),
        f"{_ATTENTION}.attention_backend_handler:AttentionBackendRegistry.register": (
            "backend_name",
            "handler_func",
        ),
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes": (
            "pre_model_load_memory",
        ),
        f"{_PAGED}.alloc": ("need_size",),
        f"{_PAGED}.alloc_extend": ("prefix_lens_cpu", "seq_lens_cpu", "num_new_pages"),
        f"{_PAGED}.alloc_decode": ("seq_lens_cpu", "last_loc"),
        f"{_PAGED}._release_page_ids": ("self",),
        f"{_PAGED}.clear": ("self",),
        f"{_PAGED}.get_all_free_pages": ("self",),
        f"{_BUDGET}.check_prefill": ("extend_input_len", "total_tokens", "chunk_limit"),
        f"{_BUDGET}.available_chunk_tokens": ("chunk_limit",),
        f"{_BUDGET}.fit_chunk": ("extend_input_len", "max_new_tokens", "chunk_limit"),
        f"{_BUDGET}.reserve": ("extend_input_len", "max_new_tokens"),
        f"{_SCHEDULER}.init_tp_model_worker": ("self",),
        f"{_SCHEDULER}.get_next_batch_to_run": ("self",),
        f"{_SCHEDULER}.update_running_batch": ("batch",),
        f"{_SCHEDULER}.is_fully_idle": ("self",),
        "sglang.srt.mem_cache.common:release_kv_cache": ("tree_cache", "checkpoint"),
        # hybrid.configs and hybrid.corrections
        "sglang.srt.configs.model_config:get_config": (
            "model",
            "revision",
            "model_override_args",
        ),
        "sglang.srt.configs.model_config:get_hybrid_layer_ids": (
            "model_architectures",
            "hf_text_config",
        ),
        "sglang.srt.configs.nemotron_h:NemotronHConfig._resolve_layers_block_type": (
            "layers_block_type",
            "hybrid_override_pattern",
        ),
        "sglang.srt.utils.hf_transformers.config:get_hf_text_config": ("config",),
        "sglang.srt.utils.hf_transformers.config:_apply_gemma4_attention_overrides": ("config",),
        "sglang.srt.model_executor.model_runner:adjust_config_with_unaligned_cpu_tp": (
            "model_config",
        ),
        "sglang.srt.layers.radix_attention:RadixAttention": ("sliding_window_size",),
        "sglang.srt.layers.radix_attention:RadixAttention.forward": ("q", "k", "v"),
        "sglang.srt.model_loader.loader:GGUFModelLoader.load_model": (
            "model_config",
            "device_config",
        ),
        f"{_MODELS}.gemma3n_causal:Gemma3nForCausalLM.load_weights": ("weights",),
        f"{_MODELS}.gemma4_causal:Gemma4ForCausalLM.load_weights": ("weights",),
        f"{_MODELS}.gpt2:GPT2LMHeadModel.load_weights": ("weights",),
        f"{_MODELS}.llama4:Llama4ForCausalLM.load_weights": ("weights",),
        f"{_MODELS}.mllama4:Llama4ForConditionalGeneration.load_weights": ("weights",),
        f"{_MODELS}.qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration.load_weights": ("weights",),
        "sglang.srt.model_executor.model_runner:resolve_sliding_window_size": (
            "model",
            "model_config",
        ),
        "sglang.srt.utils:get_num_new_pages": ("seq_lens", "page_size", "prefix_lens", "decode"),
    },
    attributes=(
        "sglang.srt.arg_groups.model_override_base:_MODEL_OVERRIDE_FNS",
        "sglang.srt.arg_groups.model_overrides.gemma2_gemma3",
        f"{_MODELS}.gemma3n_causal:RadixAttention",
        f"{_MODELS}.gpt2:RadixAttention",
        f"{_MODELS}.hunyuan:RadixAttention",
        f"{_MODELS}.olmoe:RMSNorm",
        f"{_MODELS}.phi:PhiModel",
        f"{_MODELS}.starcoder2:Starcoder2Model",
        "sglang.srt.distributed:tensor_model_parallel_all_gather",
        "sglang.srt.layers.layernorm:RMSNorm",
        f"{_ATTENTION}.attention_forward_methods.forward_methods:AttnForwardMethod.MLA",
        "sglang.srt.platforms.cpu:CpuSRTPlatform",
        "sglang.srt.platforms.cuda:CudaSRTPlatform",
        "sglang.srt.platforms.device_mixin:PlatformEnum.OOT",
        "sglang.srt.mem_cache.base_prefix_cache:EvictParams",
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks",
    ),
)
