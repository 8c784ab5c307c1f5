"""Every name of SGLang that the adapter relies on, with the shape it must have.

A new SGLang version that moves one of them fails here, by name, before anything subtle does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from typing import Any

import pytest

from tests.sglang.uncorrected import printed

pytestmark = pytest.mark.sglang

# "module below sglang.srt:object" -> its parameters; None: it only has to exist.
SEAMS: dict[str, str | None] = {
    # stand-ins
    "sglang._platform_stubs:_MockModule": "name",
    "sglang._platform_stubs:_cdiv": "a, b",
    "sglang._platform_stubs:_next_power_of_2": "n",
    "sglang._platform_stubs:_Config": "kwargs, num_warps, num_stages, **extra",
    "sglang._platform_stubs:_triton_key": "",
    # platform
    "platforms.cuda:CudaSRTPlatform": None,
    "platforms:current_platform": None,
    "platforms.interface:PlatformCapabilities": (
        "supports_triton, graph_capture, piecewise_graph, hicache_device_kernels, supports_pynccl"
    ),
    "platforms.cpu:CpuSRTPlatform": None,
    "platforms.device_mixin:PlatformEnum.OOT": None,
    "platforms.interface:SRTPlatform.apply_server_args_defaults": "self, server_args",
    "platforms.interface:SRTPlatform.post_load_model": "self, model",
    "platforms.device_mixin:DeviceMixin.get_device": "self, device_id",
    "platforms.interface:SRTPlatform.get_kv_pool_cls": "self, kind",
    "platforms.interface:SRTPlatform.get_paged_allocator_cls": "self",
    "platforms.interface:SRTPlatform.get_dispatch_key_name": "self",
    "platforms.interface:SRTPlatform.get_default_attention_backend": "self",
    "layers.rotary_embedding.rope_variant:Phi3LongRoPEScaledRotaryEmbedding": None,
    # pools of windows and of states
    "arg_groups.model_override_base:_MODEL_OVERRIDE_FNS": None,
    "arg_groups.model_overrides.gemma2_gemma3:_gemma2_gemma3_overrides": None,
    "arg_groups.model_override_base:attention_backends_of": "cfg",
    "arg_groups.model_override_base:model_config_of": "server_args",
    "arg_groups.model_override_base:resolved_view": "server_args",
    "configs.hybrid_arch:mambaish_config": "model_config",
    "layers.attention.attention_registry:ATTENTION_BACKENDS": None,
    "layers.attention.torch_native_backend:TorchNativeAttnBackend": "model_runner",
    "layers.attention.triton_backend:TritonAttnBackend": (
        "model_runner, skip_prefill, kv_indptr_buf, dllm_fa4"
    ),
    "layers.attention.triton_backend:TritonAttnBackend.init_cuda_graph_state": None,
    "layers.attention.triton_backend:TritonAttnBackend._init_forward_metadata_out_graph": (
        "self, forward_batch, in_capture"
    ),
    "mem_cache.allocator.swa:SWATokenToKVPoolAllocator": (
        "size, size_swa, page_size, dtype, device, kvcache, need_sort, req_to_token_pool"
    ),
    "mem_cache.kv_cache_configurator:SWATokenToKVPoolAllocator": None,
    "mem_cache.kv_cache_configurator:HybridReqToTokenPool": None,
    "mem_cache.layout.token_major:build_mamba_entry_views": (
        "raw, layer_num, conv_state_shapes, conv_dtype, temporal_state_shape, temporal_dtype, "
        "max_slots, anchor_bytes, entry_bytes, offset_bytes"
    ),
    "mem_cache.layout.token_major:mamba_entry_bytes": (
        "layer_num, conv_state_shapes, conv_dtype, temporal_state_shape, temporal_dtype"
    ),
    "mem_cache.memory_pool:HybridReqToTokenPool.mamba_pool_cls": None,
    "mem_cache.memory_pool:HybridReqToTokenPool._init_mamba_pool": None,
    "mem_cache.memory_pool:MambaPool.State": None,
    # kernels
    "sglang.kernels.ops.activation.softcap:softcap_inplace_logits": (
        "full_logits, final_logit_softcapping"
    ),
    "sglang.kernels.ops.elementwise.elementwise:fused_gate_sigmoid_mul": (
        "hidden_states, gate_weight, shared_output"
    ),
    "sglang.kernels.ops.elementwise.elementwise:fused_gate_sigmoid_mul_add": (
        "hidden_states, gate_weight, shared_output, final_hidden_states"
    ),
    "sglang.kernels.ops.attention.fla.fused_norm_gate:FusedRMSNormGated.forward": None,
    "sglang.kernels.ops.attention.fla.layernorm_gated:RMSNorm.forward": None,
    "layers.attention.linear.gdn_backend:causal_conv1d_fn": None,
    "layers.attention.linear.gdn_backend:causal_conv1d_update": None,
    "layers.attention.linear.gdn_backend:fused_gdn_gating": None,
    "layers.attention.linear.kernels.gdn_triton:TritonGDNKernel.extend": None,
    "layers.attention.linear.kernels.gdn_triton:TritonGDNKernel.packed_decode": None,
    "layers.attention.mamba.causal_conv1d:_causal_conv1d_fn_triton": None,
    "layers.attention.mamba.causal_conv1d:_causal_conv1d_update_triton": None,
    "layers.attention.mamba.mamba:mamba_chunk_scan_combined": None,
    "layers.attention.mamba.mamba:selective_state_update": None,
    "models.qwen2_moe:fused_gate_sigmoid_mul": None,
    "models.qwen2_moe:fused_gate_sigmoid_mul_add": None,
    "models.qwen3_5:fused_qkvzba_split_reshape_cat_contiguous": None,
    "models.qwen3_5:fused_sigmoid_mul": None,
    "models.qwen3_next:fused_qkvzba_split_reshape_cat": None,
    "layers.logits_processor:fused_softcap": "full_logits, final_logit_softcapping",
    "layers.moe.fused_moe_native:moe_forward_native": ("layer, x, topk_output, moe_runner_config"),
    "layers.moe.topk:fused_topk_native": (
        "hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func"
    ),
    "models.llama4:Llama4Attention.forward": "self, positions, hidden_states, forward_batch",
    "models.llama4:Llama4Attention._get_attn_scale": "self, positions",
    "models.minimax_m2:rms_sumsq_serial": "x1, x2",
    "models.minimax_m2:rms_apply_serial": "x1, x2, w1, w2, sum_sq, tp_world, eps",
    # models
    "configs.nemotron_h:NemotronHConfig._resolve_layers_block_type": (
        "layers_block_type, hybrid_override_pattern, kwargs"
    ),
    "layers.radix_attention:RadixAttention.forward": (
        "self, q, k, v, forward_batch, save_kv_cache, key_value_num_tokens, **kwargs"
    ),
    "configs.update_config:adjust_tp_num_heads_if_necessary": (
        "model_config, tp_size, is_post_update"
    ),
    "models.transformers:TransformersBase._init_parameters": "self, module",
    "configs.model_config:get_config": (
        "model, trust_remote_code, revision, model_override_args, model_config_parser, **kwargs"
    ),
    "configs.model_config:get_hybrid_layer_ids": "model_architectures, hf_text_config",
    "model_executor.model_runner:adjust_config_with_unaligned_cpu_tp": (
        "model_config, load_config, tp_size"
    ),
    "models.gemma3n_causal:Gemma3nForCausalLM.load_weights": "self, weights",
    "models.gemma3n_causal:RadixAttention": None,
    "models.gemma4_causal:Gemma4ForCausalLM.load_weights": "self, weights",
    "models.gemma4_causal:Gemma4Router.forward": "self, x",
    "layers.rotary_embedding:get_rope": None,
    "layers.rotary_embedding:get_rope_wrapper": None,
    "models.deepseek_v2:get_rope_wrapper": None,
    "models.gpt2:GPT2LMHeadModel.load_weights": "self, weights",
    "models.gpt2:RadixAttention": None,
    "models.hunyuan:RadixAttention": None,
    "models.olmoe:RMSNorm": None,
    "models.phi:PhiModel": None,
    "models.starcoder2:Starcoder2Model": None,
    "distributed:tensor_model_parallel_all_gather": "input_, dim",
    "layers.layernorm:RMSNorm": None,
    "utils.hf_transformers.config:_apply_gemma4_attention_overrides": "config",
    "utils.hf_transformers.config:get_hf_text_config": "config",
    "models.llama4:Llama4ForCausalLM.load_weights": "self, weights",
    "models.mllama4:Llama4ForConditionalGeneration.load_weights": "self, weights",
    "models.qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration.load_weights": "self, weights",
    "model_executor.model_runner:resolve_sliding_window_size": "model, model_config",
    # vision towers
    "managers.mm_utils:general_mm_embed_routine": (
        "input_ids, forward_batch, language_model, multimodal_model, data_embedding_funcs,"
        " placeholder_tokens, use_deepstack, feature_dtypes, **kwargs"
    ),
    "managers.mm_utils:pad_mm_tokens": "input_ids, mm_inputs",
    "model_loader.weight_utils:default_weight_loader": "param, loaded_weight",
    # weights
    "model_loader.loader:get_model_loader": "load_config, model_config",
    "model_loader.loader:DefaultModelLoader": "load_config",
    "model_loader.loader:DefaultModelLoader.load_model": "self, model_config, device_config",
    "model_loader.loader:DefaultModelLoader._get_all_weights": "self, model_config, model",
    "model_loader.loader:DefaultModelLoader.load_weights_only": "model, weights, target_device",
    "model_loader.loader:_modules_with_quant_method": "model",
    "model_loader.loader:device_loading_context": "module, target_device",
    "layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading": (
        "self, layer"
    ),
    "layers.quantization.bitsandbytes:BitsAndBytesLinearMethod": None,
    "layers.quantization.gguf:GGUFEmbeddingMethod": None,
    "layers.quantization.gguf:GGUFLinearMethod": None,
    "layers.quantization.unquant:UnquantizedEmbeddingMethod": None,
    "layers.quantization.unquant:UnquantizedFusedMoEMethod": None,
    "layers.quantization.unquant:UnquantizedLinearMethod": None,
    "model_loader.loader:GGUFModelLoader.load_model": "self, model_config, device_config",
    "models.llama:LlamaForCausalLM.bitsandbytes_stacked_params_mapping": None,
    "model_loader.loader:_initialize_model": "model_config, load_config, quant_config",
    "model_loader.loader:_get_quantization_config": None,
    "model_loader.loader:set_default_torch_dtype": "dtype",
    "configs.load_config:LoadFormat.SAFETENSORS": None,
    "model_loader.weight_utils:download_weights_from_hf": (
        "model_name_or_path, cache_dir, allow_patterns, revision, ignore_patterns, max_retries"
    ),
    # KV pool and allocator
    "mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal": "self",
    "mem_cache.memory_pool:MLATokenToKVPool._create_buffers": "self",
    "models.deepseek_common.attention_backend_handler:AttentionBackendRegistry.register": (
        "backend_name, handler_func"
    ),
    "models.deepseek_common.attention_forward_methods.forward_methods:AttnForwardMethod.MLA": None,
    "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.clear": "self",
    "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc": "self, need_size",
    "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_extend": (
        "self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, "
        "extend_num_tokens, num_new_pages"
    ),
    "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_decode": (
        "self, seq_lens, seq_lens_cpu, last_loc"
    ),
    "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator._release_page_ids": "self, *page_ids",
    "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.get_all_free_pages": "self",
    "mem_cache.allocator.base:BaseTokenToKVPoolAllocator.create_prefill_budget": (
        "self, tree_cache, num_mixed_decode_tokens"
    ),
    "mem_cache.allocator.base:BaseTokenToKVPoolAllocator.evict_to_free_tokens": (
        "self, tree_cache, num_tokens"
    ),
    "mem_cache.allocator.base:BaseTokenToKVPoolAllocator.check_decode_capacity": (
        "self, num_tokens, tree_cache, requests, spec_algorithm"
    ),
    "mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes": (
        "self, pre_model_load_memory"
    ),
    "mem_cache.base_prefix_cache:EvictParams": "num_tokens, swa_num_tokens, mamba_num",
    "mem_cache.base_prefix_cache:EvictResult": None,
    "mem_cache.base_prefix_cache:InsertParams": None,
    "mem_cache.radix_cache:RadixKey": "token_ids, extra_key, is_bigram, limit, cache_salt",
    "mem_cache.unified_radix_cache:UnifiedRadixCache.insert": "self, params",
    "mem_cache.base_prefix_cache:BasePrefixCache.evict_for_alloc": (
        "self, params, allocation_reclaim_satisfied"
    ),
    "mem_cache.unified_radix_cache:UnifiedRadixCache": None,
    "mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore.walk_for_kv_canary": (
        "self, unlocked_only, swa_resident_only"
    ),
    "mem_cache.common:release_kv_cache": "req, tree_cache, checkpoint",
    "utils:get_num_new_pages": None,
    # admission
    "mem_cache.prefill_budget:PrefillBudget": "allocator, tree_cache, num_mixed_decode_tokens",
    "mem_cache.prefill_budget:PrefillBudget._available_and_evictable": "self",
    "mem_cache.prefill_budget:PrefillBudget.check_prefill": (
        "self, extend_input_len, total_tokens, max_new_tokens, input_tokens, "
        "swa_host_hit_length, chunk_limit, auxiliary_swa_host_hit_length"
    ),
    "mem_cache.prefill_budget:PrefillBudget.available_chunk_tokens": "self, chunk_limit",
    "mem_cache.prefill_budget:PrefillBudget.fit_chunk": (
        "self, extend_input_len, max_new_tokens, chunk_limit"
    ),
    "mem_cache.prefill_budget:PrefillBudget.reserve": (
        "self, extend_input_len, max_new_tokens, extra_tokens, chunk_limit, is_chunked_continuation"
    ),
    # scheduler
    "managers.scheduler:Scheduler": "server_args, port_args",
    "managers.scheduler:Scheduler.init_ipc_channels": "self, port_args",
    "managers.scheduler:Scheduler.init_idle_sleeper": "self",
    "managers.scheduler:Scheduler.init_tp_model_worker": "self",
    "managers.scheduler:Scheduler.init_watch_dog_memory_saver_input_blocker": "self",
    "managers.scheduler:Scheduler.init_request_receiver": "self",
    "managers.scheduler:Scheduler.get_output_streamer_class": "self",
    "managers.scheduler:Scheduler._create_generation_req": "self, recv_req, *args, **kwargs",
    "managers.scheduler:Scheduler.get_next_batch_to_run": "self, running_batch, last_batch",
    "managers.scheduler:Scheduler.update_running_batch": "self, batch",
    "managers.scheduler:Scheduler.run_event_loop": "self",
    "managers.scheduler:Scheduler.run_batch": "self, batch, pp_proxy_tensors",
    "managers.scheduler:Scheduler.process_batch_result": "self, batch, result",
    "managers.scheduler:Scheduler.process_input_requests": "self, recv_reqs",
    "managers.scheduler:Scheduler._add_request_to_queue": "self, req, is_retracted",
    "managers.scheduler:Scheduler._release_aborted_request": "self, req",
    "managers.scheduler:Scheduler.abort_request": "self, recv_req",
    "managers.scheduler:Scheduler.can_schedule_lora_req": "self, req, running_loras",
    "managers.scheduler:Scheduler.is_fully_idle": "self, for_health_check, ignore_waiting",
    "managers.scheduler:Scheduler.on_idle": "self",
    "managers.scheduler:Scheduler.release_host_resources": "self",
    "managers.schedule_batch:Req.reset_for_retract": "self",
    "managers.schedule_batch:Req.output_ids_through_stop": None,
    "managers.schedule_batch:Req.init_next_round_input": "self, tree_cache, cow_mamba",
    "managers.schedule_batch:ScheduleBatch.check_decode_mem": "self, selected_indices",
    "managers.schedule_batch:ScheduleBatch.merge_batch": "self, other",
    "sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch": "batch, vocab_size",
    "managers.schedule_batch:Modality.IMAGE": None,
    "managers.schedule_batch:MultimodalDataItem.set_identity": "self, identity",
    "managers.schedule_batch:MultimodalInputs": None,
    "layers.rotary_embedding:MRotaryEmbedding.get_rope_index": (
        "spatial_merge_size, image_token_id, video_token_id, vision_start_token_id, model_type, "
        "tokens_per_second, input_ids, image_grid_thw, video_grid_thw, second_per_grid_ts, **kwargs"
    ),
    **{f"managers.schedule_batch:FINISH_{w}": None for w in ("ABORT", "LENGTH", "MATCHED_TOKEN")},
    "managers.io_struct:AbortReq": None,
    "managers.io_struct:TokenizedEmbeddingReqInput": None,
    "managers.io_struct:TokenizedGenerateReqInput": None,
    "managers.scheduler_components.ipc_channels:SchedulerIpcChannels": (
        "recv_from_tokenizer, recv_from_rpc, send_to_tokenizer, send_to_detokenizer, "
        "send_metrics_from_scheduler"
    ),
    "managers.scheduler_components.output_streamer:SchedulerOutputStreamer.stream_output": (
        "self, reqs, return_logprob, skip_req"
    ),
    "managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter._shutdown_fpm": "self",
    "utils.common:DynamicGradMode": None,
    "utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create": "enable",
    "utils.watchdog:Watchdog.create": "debug_name, watchdog_timeout, soft, test_stuck_time",
    # hooks of stock servers
    "plugins.hook_registry:HookRegistry.register": "target, hook, hook_type, source",
    "plugins.hook_registry:HookRegistry.apply_hooks": "",
    "plugins.hook_registry:HookType.AROUND": None,
    "managers.scheduler_components.idle_sleeper:IdleSleeper": "sockets, can_empty_cache",
    # process-wide state
    "runtime_context:publish": "server_args, role, hf_config, ranks",
    "runtime_context:reset_context": "",
    "runtime_context:get_server_args": "",
    "runtime_context:get_device": "",
    "runtime_context:get_parallel": "",
    "runtime_context:get_context": "",
    "runtime_context:get_exec": "",
    "runtime_context:SpawnRanks": "world_rank, dp_rank, gpu_id",
    "runtime_context:RuntimeContext.override": "self, source, **fields",
    "distributed.parallel_state:destroy_model_parallel": "",
    "distributed.parallel_state:destroy_distributed_environment": "",
    "environ:envs.SGLANG_SWA_EVICTION_INTERVAL": None,
    "environ:envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": None,
    "models.registry:ModelRegistry": None,
    # graphs of decode steps, and tensors that outlive a model
    "platforms.interface:SRTPlatform.get_graph_runner_cls": "self",
    "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner": (
        "model_runner, attn_backend, speculative_num_steps, speculative_num_draft_tokens, "
        "record_nolora_graph"
    ),
    "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.capture": "self",
    "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.can_run_graph": (
        "self, forward_batch"
    ),
    "model_executor.runner.base_runner:BaseRunner.warmup": "self",
    "model_executor.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend.cleanup": "self",
    "model_executor.runner_utils.capture_mode:model_capture_mode": "",
    "model_executor.runner_utils.capture_mode:_set_capture_attention_variant": "variant",
    "model_executor.graph_shared_output:GraphSharedOutput._process_shared": None,
    "model_executor.input_buffers:_forward_input_buffer_pool": None,
    "model_executor.runner.eager_runner:build_eager_registry": (
        "device, max_bs, max_num_token, cache_loc_dtype, enable_mamba_track, is_encoder_decoder, "
        "encoder_len_fill_value, encoder_lens_dtype"
    ),
    "runtime_context:get_schedule": "",
    "layers.rotary_embedding.factory:_ROPE_DICT": None,
    "managers.mm_schedule:embedding_cache": None,
    # arguments and sampling
    "layers.sampler:multinomial_with_seed": "logprobs, seed, positions",
    "layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch": (
        "probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, "
        "return_filtered_probs, max_top_k"
    ),
    "server_args:ServerArgs": None,
    "server_args:PortArgs": None,
    "sampling.sampling_params:SamplingParams.normalize": "self, tokenizer",
    "sampling.sampling_params:SamplingParams.verify": "self, vocab_size",
    "sampling.sampling_params:TOP_K_ALL": None,
    "sampling.penaltylib:BatchedFrequencyPenalizer.is_prepared": "self",
    "sampling.penaltylib:BatchedPresencePenalizer.is_prepared": "self",
    "sampling.penaltylib:BatchedRepetitionPenalizer.is_prepared": "self",
    "sampling.penaltylib:BatchedMinNewTokensPenalizer.is_prepared": "self",
    # grammars and log probabilities
    "constrained.base_grammar_backend:BaseGrammarBackend._init_value_dispatch": (
        "self, key, require_reasoning"
    ),
    "constrained.base_grammar_backend:BaseGrammarBackend.get_cached_or_future_value": (
        "self, key, require_reasoning"
    ),
    "constrained.base_grammar_backend:BaseGrammarBackend.set_cache": "self, key, value",
    "constrained.base_grammar_backend:BaseGrammarObject.accept_token": "self, token",
    "constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched": (
        "entries, vocab_mask"
    ),
    "constrained.base_grammar_backend:GrammarRow": "row, grammar",
    "constrained.base_grammar_backend:InvalidGrammarObject": "error_message",
    "constrained.grammar_manager:GrammarManager.get_ready_grammar_requests": "self",
    "constrained.json_schema_validation:_iter_subschemas": "schema, pointer",
    "constrained.json_schema_validation:validate_xgrammar_json_schema": "schema",
    "constrained.xgrammar_backend:XGrammarGrammar": (
        "matcher, vocab_size, ctx, override_stop_tokens, key_string, grammar_stats"
    ),
    "constrained.xgrammar_backend:XGrammarGrammarBackend": (
        "tokenizer, vocab_size, model_eos_token_ids, any_whitespace, max_whitespace_cnt"
    ),
    "managers.scheduler:Scheduler.init_grammar_manager": "self",
    # adapters
    "lora.backend.lora_registry:register_lora_backend": "name",
    "lora.backend.torch_backend:TorchNativeLoRABackend.prepare_lora_batch": (
        "self, forward_batch, weight_indices, lora_ranks, scalings, use_cuda_graph,"
        " use_prefill_cuda_graph"
    ),
    "lora.lora_registry:LoRARef": "lora_id, lora_name, lora_path, pinned",
    "lora.lora_manager:LoRAManager.load_lora_adapter_from_tensors": (
        "self, lora_ref, tensors, config_dict, added_tokens_config"
    ),
    "lora.lora_manager:LoRAManager.unload_lora_adapter": "self, lora_ref",
    "managers.schedule_batch:Req.set_finish_with_abort": ("self, error_msg, status_code, err_type"),
    "model_executor.forward_batch_info:ForwardMode.EXTEND": None,
    "layers.dual_gemm:DualGemm._select_mode": "self, gate_up_proj, hidden_size",
    "layers.sampler:murmur_hash32": "seed, positions, col_indices",
}


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    from prism.engines.sglang.platform import stubs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import it lists what accelerators are missing
        stubs.install()
        importlib.import_module("sglang.srt.managers.scheduler")


def resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    module = module if module.startswith("sglang.") else f"sglang.srt.{module}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def parameters(function: Any) -> list[str]:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function).parameters.values()
    return [marks.get(p.kind, "") + p.name for p in signature]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    seams: dict[str, str] = json.loads(printed(__name__, print_seams.__name__)[-1])
    return seams


def print_seams() -> None:
    """Prints the parameters of each seam, "" if it only has to exist, or an error."""
    seams = {}
    for name, expected in SEAMS.items():
        try:
            there = resolve(name)
            seams[name] = "" if expected is None else ", ".join(parameters(there))
        except (AttributeError, ImportError) as error:
            seams[name] = repr(error)
    print(json.dumps(seams))


@pytest.mark.parametrize("name", SEAMS)
def test_seam(name: str, found: dict[str, str]) -> None:
    assert found[name] == (SEAMS[name] or "")


def stock_base(cls: type) -> type:
    """Returns SGLang's class that `cls` is derived from."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("sglang."))


def test_our_overrides_keep_their_signatures() -> None:
    from kvcached.engines.sglang.allocator import KvcachedAllocator
    from kvcached.engines.sglang.budget import KvcachedBudget
    from kvcached.engines.sglang.hybrid.states import StatePool, StateRows
    from kvcached.engines.sglang.hybrid.torch_attention import TorchAttention
    from kvcached.engines.sglang.hybrid.windows import KvcachedWindowAllocator
    from kvcached.engines.sglang.kv_pool import KvcachedPool
    from kvcached.engines.sglang.platform import NativeCpuPlatform
    from prism.engines.sglang.decode_graphs import LazyGraphRunner
    from prism.engines.sglang.loader import KvcachedLoader
    from prism.engines.sglang.platform.noise import random_bits
    from prism.engines.sglang.scheduling.scheduler import InProcessScheduler, InProcessStreamer

    classes = (
        KvcachedAllocator,
        KvcachedBudget,
        KvcachedLoader,
        KvcachedPool,
        KvcachedWindowAllocator,
        StatePool,
        StateRows,
        TorchAttention,
        LazyGraphRunner,
        NativeCpuPlatform,
        InProcessScheduler,
        InProcessStreamer,
    )
    ours = {
        f"{cls.__name__}.{name}": (method, getattr(stock_base(cls), name))
        for cls in classes
        for own in cls.__mro__[: cls.__mro__.index(stock_base(cls))]
        for name, method in vars(own).items()
        if inspect.isfunction(method) and name != "__init__" and hasattr(stock_base(cls), name)
    }
    assert len(ours) > 20
    for name, (mine, stock) in ours.items():
        if not parameters(mine)[-1].startswith("**"):
            assert parameters(mine) == parameters(stock), name
    assert parameters(random_bits) == ["seed", "positions", "col_indices"]


def test_the_platform_is_found_by_its_entry_point() -> None:
    from sglang.srt import platforms

    from kvcached.engines.sglang.platform import NativeCpuPlatform

    assert isinstance(platforms.current_platform, NativeCpuPlatform)


def test_private_attributes_that_are_read() -> None:
    """Attributes of instances do not have a signature: their names must occur where they are
    set."""
    source = inspect.getsource(resolve("managers.scheduler:Scheduler"))
    for name in (
        "chunked_req",
        "waiting_queue",
        "running_batch",
        "last_batch",
        "cur_batch_for_debug",
        "_sched_idled",
        "_war_barrier_enabled",
        "schedule_stream",
        "load_snapshot_writer",
        "recv_skipper",
        "input_blocker",
        "token_to_kv_pool_allocator",
        "tree_cache",
        "copy_stream",
        "idle_sleeper",
    ):
        assert f"self.{name}" in source, name
    processor = "managers.scheduler_components.batch_result_processor"
    results = importlib.import_module(f"sglang.srt.{processor}")
    assert "req.embedding = embeddings[i]" in inspect.getsource(results)
    streamer = resolve("managers.scheduler_components.output_streamer:SchedulerOutputStreamer")
    assert "is_generation" in streamer.__annotations__
    sleeper = resolve("managers.scheduler_components.idle_sleeper:IdleSleeper")
    assert "self.poller.register(" in inspect.getsource(sleeper)
    runner = inspect.getsource(resolve("model_executor.model_runner:ModelRunner"))
    for name in ("decode_cuda_graph_runner", "forward_stream"):
        assert f"self.{name} = " in runner, name
    # What a lazy capture relies on: sizes are read from `capture_bs`, and the constructor's last
    # act is `capture`, within the mode that a later capture enters by itself.
    decode = resolve("model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner")
    assert "reversed(self.capture_bs)" in inspect.getsource(decode._capture_one_stream)
    assert "self.capture_bs" in inspect.getsource(decode.load_batch)
    assert "_metadata_prep_fork_resolved" in inspect.getsource(decode._run_in_graph_metadata_prep)
    assert "with model_capture_mode():\n                self.capture()" in (
        inspect.getsource(decode.__init__)
    )
    req = inspect.getsource(resolve("managers.schedule_batch:Req"))
    for name in ("send_token_offset", "finished_output", "finished_len", "prefix_len"):
        assert f"self.{name}" in req, name
    for kind in ("frequency", "presence", "repetition"):
        module = "sampling.penaltylib"
        penalizer = inspect.getsource(resolve(f"{module}:Batched{kind.title()}Penalizer"))
        for name in (f"{kind}_penalties", f"cumulated_{kind}_penalties"):
            assert f"self.{name}" in penalizer, name
        # Output of before the prefill is not counted by SGLang: it would be counted twice.
        assert "output_ids" not in penalizer.partition("def _cumulate_output_tokens")[0]
    # A class as the load format is taken as the loader.
    assert "isinstance(load_config.load_format, type)" in inspect.getsource(
        resolve("model_loader.loader:get_model_loader")
    )
    paged = inspect.getsource(resolve("mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"))
    for name in ("free_pages", "free_page_ids_group", "staged_pages", "num_staged_pages"):
        assert f"self.{name}" in paged, name


def test_what_grammars_and_log_probabilities_rest_on() -> None:
    from prism.engines.sglang.grammars import grammar_manager as grammars

    req = inspect.getsource(resolve("managers.schedule_batch:Req"))
    for name in ("input_logprob_sent", "logprob_start_len", "return_logprob", "tokenizer"):
        assert f"self.{name}" in req, name
    manager = inspect.getsource(resolve("constrained.grammar_manager:GrammarManager"))
    polls = ("SGLANG_GRAMMAR_POLL_INTERVAL", "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS")
    ranks = ("grammar_sync_entry", "grammar_sync_group", "grammar_sync_size")
    for name in (*polls, *ranks, "is_grammar_sync_entry", "grammar_backend", "grammar_queue"):
        assert f"self.{name}" in manager, name
    assert manager.count(grammars._TIMED_OUT) == 2  # for the cache, and the request
    # All attributes of a request's grammar that a step uses.
    sampling = inspect.getsource(
        resolve("sampling.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask")
    )
    assert set(re.findall(r"grammar\.(\w+)", sampling)) == {
        "allocate_vocab_mask",
        "fill_vocab_mask_batched",
        "finished",
        "is_terminated",
        "move_vocab_mask",
    }
    xgrammar = inspect.getsource(resolve("constrained.xgrammar_backend:XGrammarGrammarBackend"))
    assert "self.grammar_compiler" in xgrammar
    least = inspect.getsource(resolve("sampling.penaltylib:BatchedMinNewTokensPenalizer"))
    assert "self.len_output_tokens += 1" in least
    # All attributes of a request's tokenizer that SGLang uses without stop strings.
    found = set(re.findall(r"req\.tokenizer\.(\w+)", least))
    assert found == {"additional_stop_token_ids", "eos_token_id"}


def test_what_images_rest_on() -> None:
    scheduler = resolve("managers.scheduler:Scheduler")
    taken = inspect.getsource(scheduler._get_multimodal_inputs)
    assert "isinstance(mm_inputs, MultimodalInputs):\n            return mm_inputs" in taken
    inputs = resolve("managers.schedule_batch:MultimodalInputs").__dataclass_fields__
    assert {"mm_items", "im_token_id", "mrope_positions", "mrope_position_delta"} <= set(inputs)
    item = resolve("managers.schedule_batch:MultimodalDataItem").__struct_fields__
    assert {"modality", "feature", "offsets", "model_specific_data"} <= set(item)
    # Pixtral's towers compute SiLU alone.
    assert "self.act_fn = SiluAndMul()" in inspect.getsource(resolve("models.pixtral:PixtralHFMLP"))
    # Positions of a prompt that is computed again are read as far as its output.
    batch = resolve("model_executor.forward_batch_info:ForwardBatch")
    extend = inspect.getsource(batch._compute_mrope_positions_extend)
    assert "mm_input.mrope_positions[" in extend
