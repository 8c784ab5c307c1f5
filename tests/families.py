"""A tiny configuration of each family of models, for transformers' configuration classes."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 1152
WINDOW = 32

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
_HEAD: dict[str, Any] = {**_SIZES, "head_dim": 32}
_MHA: dict[str, Any] = {**_SIZES, "num_key_value_heads": 6}
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DEEPSEEK: dict[str, Any] = {
    **_LATENT,
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
YARN: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
}
_DELTA_NET: dict[str, Any] = {
    **_HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA: dict[str, Any] = {
    **_SIZES,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}

# model_type -> settings
TINY: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | _WINDOWS,
    "ministral": _HEAD | _WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "ministral3": _HEAD,
    "qwen2": _SIZES,
    "qwen3": _HEAD | {"attention_bias": True},
    "gemma": _HEAD,
    "gemma2": _HEAD | _WINDOWS | {"hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": _HEAD | _WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi3": _SIZES | _WINDOWS,
    "granite": _SIZES,
    "olmo": _MHA,
    "olmo2": _SIZES,
    "olmo3": _SIZES | _WINDOWS,
    "cohere": _SIZES | {"use_qk_norm": True},
    "cohere2": _SIZES | _WINDOWS,
    "glm": _HEAD | {"attention_bias": True},
    "glm4": _HEAD,
    "stablelm": _SIZES | {"use_qkv_bias": True},
    "smollm3": _SIZES,
    "exaone4": _SIZES
    | _WINDOWS
    | {"sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"] * 2},
    "seed_oss": _HEAD,
    "starcoder2": _SIZES | _WINDOWS,
    "nemotron": _HEAD,
    "arcee": _SIZES | {"mlp_bias": True},
    "ernie4_5": _HEAD | {"use_bias": True},
    "hunyuan_v1_dense": _SIZES | {"head_dim": 16, "use_qk_norm": True},
    "gpt_neox": {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"},
    "phi": _MHA | {"intermediate_size": 384},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 96,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 512,
        "n_inner": 160,
    },
    "gpt_bigcode": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 96,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 512,
    },
    "gptj": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 96,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 512,
        "rotary_dim": 8,
    },
    "opt": {
        **{k: v for k, v in _SIZES.items() if k != "num_key_value_heads"},
        "ffn_dim": 160,
        "word_embed_proj_dim": 48,
    },
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "n_layer": 3, "n_head": 6},
    "falcon": _SIZES,
    "mixtral": _SIZES | {"num_local_experts": 4},
    "qwen2_moe": _SIZES | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _HEAD | _EXPERTS | {"num_experts": 4},
    "olmoe": _MHA | {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _SIZES | {"num_local_experts": 4, "lm_head_bias": True},
    "granitemoe": _SIZES | {"num_local_experts": 4},
    "gpt_oss": _HEAD | _WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_HEAD, **_EXPERTS, "n_routed_experts": 4, "use_qk_norm": True},
    "dots1": {
        **_HEAD,
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        **_SIZES,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "minimax_m2": _HEAD
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "rotary_dim": 16,
    },
    "llama4_text": _HEAD
    | {
        "num_local_experts": 4,
        "intermediate_size_mlp": 160,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 256,
    },
    "deepseek_v2": _DEEPSEEK | YARN | {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": _DEEPSEEK
    | YARN
    | {
        "q_lora_rank": None,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "deepseek_v32": _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 128, "index_topk": 16},
    "glm4_moe_lite": _DEEPSEEK,
    "minicpm3": _LATENT,
    "qwen3_next": _DELTA_NET | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET
    | _EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "lfm2": _SIZES | {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "lfm2_moe": _SIZES
    | _EXPERTS
    | {
        "num_experts": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "nemotron_h": _HEAD
    | {
        "hybrid_override_pattern": "M*-E",
        "mamba_num_heads": 6,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 192},
    "granitemoehybrid": _MAMBA
    | {
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "gemma3n_text": _HEAD
    | _WINDOWS
    | {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": _HEAD
    | _WINDOWS
    | {
        "num_kv_shared_layers": 2,
        "global_head_dim": 48,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
