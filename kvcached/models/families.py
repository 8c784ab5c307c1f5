"""Families of models by `model_type`: how their config.json is read, and its defaults.

The defaults are those of transformers' configuration classes, for keys that files omit; tests
compare the two. A key without a default must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcached.models import classic, gemma, hybrids, mixtures
from kvcached.models.config_keys import ConfigKeys
from kvcached.models.decoders import (
    Decoder,
    chunks,
    same_mlps,
    window_by_switch,
    window_everywhere,
    window_everywhere_by_switch,
    window_except_every,
)
from kvcached.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Family:
    """A reader, and defaults of keys."""

    read: Callable[[ConfigKeys], ModelShape]
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Families in which a file without num_key_value_heads has as many as query heads.
_MHA: dict[str, Any] = {"num_key_value_heads": None}


def _decoder(decoder: Decoder, **defaults: Any) -> Family:
    return Family(decoder.shape, defaults)


_QWEN: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}

DENSE: dict[str, Family] = {
    "llama": _decoder(Decoder(), max_position_embeddings=2048, vocab_size=32000, **_MHA),
    "mistral": _decoder(
        Decoder(qkv_bias=False, out_bias=False, windows=window_everywhere), sliding_window=4096
    ),
    "ministral": _decoder(
        Decoder(qkv_bias=False, out_bias=False, windows=window_except_every(None))
    ),
    "ministral3": _decoder(Decoder(qkv_bias=False, out_bias=False), head_dim=128),
    "qwen2": _decoder(Decoder(qkv_bias=True, out_bias=False, windows=window_by_switch), **_QWEN),
    "qwen3": _decoder(
        Decoder(qk_norm="head", windows=window_by_switch),
        head_dim=128,
        max_position_embeddings=32768,
        **_QWEN,
    ),
    "gemma": _decoder(Decoder(), tie_word_embeddings=True, head_dim=256),
    "gemma2": _decoder(
        Decoder(norms=4, windows=window_except_every(2)),
        tie_word_embeddings=True,
        head_dim=256,
        sliding_window=4096,
    ),
    "gemma3_text": _decoder(
        Decoder(norms=4, qk_norm="head", windows=window_except_every(6)),
        tie_word_embeddings=True,
        head_dim=256,
        sliding_window=4096,
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=26,
        max_position_embeddings=131_072,
    ),
    "phi3": _decoder(Decoder(qkv_bias=False, out_bias=False, windows=window_everywhere), **_MHA),
    "granite": _decoder(Decoder(), **_MHA),
    "olmo": _decoder(Decoder(norm_scale=False), **_MHA),
    "olmo2": _decoder(Decoder(qk_norm="all"), **_MHA),
    "olmo3": _decoder(
        Decoder(qk_norm="all", windows=window_except_every(4)), sliding_window=4096, **_MHA
    ),
    "cohere": _decoder(
        Decoder(norms=1, qk_norm="all", qk_norm_key="use_qk_norm"), tie_word_embeddings=True, **_MHA
    ),
    "cohere2": _decoder(
        Decoder(norms=1, windows=window_except_every(4)),
        tie_word_embeddings=True,
        sliding_window=4096,
        **_MHA,
    ),
    "glm": _decoder(Decoder(out_bias=False), attention_bias=True, head_dim=128),
    "glm4": _decoder(Decoder(out_bias=False, norms=4), attention_bias=True, head_dim=128),
    "stablelm": _decoder(
        Decoder(
            qkv_bias="use_qkv_bias",
            out_bias=False,
            qk_norm="all",
            qk_norm_key="qk_layernorm",
            norm_bias=True,
            parallel_key="use_parallel_residual",
        )
    ),
    "smollm3": _decoder(Decoder(windows=window_by_switch), tie_word_embeddings=True),
    "exaone4": _decoder(
        Decoder(qkv_bias=False, out_bias=False, qk_norm="head", windows=window_except_every(4)),
        sliding_window=4096,
    ),
    "seed_oss": _decoder(Decoder(out_bias="attention_out_bias"), attention_bias=True, head_dim=128),
    "starcoder2": _decoder(
        Decoder(
            qkv_bias="use_bias",
            out_bias="use_bias",
            norm_bias=True,
            mlps=same_mlps(gated=False, bias="use_bias"),
            windows=window_everywhere,
        ),
        tie_word_embeddings=True,
        use_bias=True,
    ),
    "nemotron": _decoder(Decoder(norm_bias=True, mlps=same_mlps(gated=False))),
    "arcee": _decoder(Decoder(mlps=same_mlps(gated=False)), **_MHA),
    "ernie4_5": _decoder(
        Decoder(qkv_bias="use_bias", out_bias="use_bias", mlps=same_mlps(bias="use_bias")),
        tie_word_embeddings=True,
        head_dim=128,
    ),
    "hunyuan_v1_dense": _decoder(Decoder(qk_norm="head")),
    "gpt_neox": _decoder(
        Decoder(norm_bias=True, mlps=same_mlps(gated=False)),
        attention_bias=True,
        mlp_bias=True,
        **_MHA,
    ),
    "phi": _decoder(
        Decoder(
            qkv_bias=True,
            out_bias=True,
            norms=1,
            norm_bias=True,
            head_bias=True,
            mlps=same_mlps(gated=False),
        ),
        mlp_bias=True,
        **_MHA,
    ),
}

CLASSIC: dict[str, Family] = {
    "gpt2": Family(
        classic.gpt2,
        {
            "tie_word_embeddings": True,
            "n_layer": 12,
            "n_head": 12,
            "n_embd": 768,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
    ),
    "gpt_bigcode": Family(classic.gpt2, {"tie_word_embeddings": True, "multi_query": True}),
    "gptj": Family(classic.gptj),
    "opt": Family(
        classic.opt,
        {"tie_word_embeddings": True, "enable_bias": True, "do_layer_norm_before": True},
    ),
    "bloom": Family(classic.bloom, {"tie_word_embeddings": True, "seq_length": 2048}),
    "falcon": Family(
        classic.falcon,
        {
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
            "max_position_embeddings": 2048,
        },
    ),
}

EXPERTS: dict[str, Family] = {
    "mixtral": _decoder(
        Decoder(qkv_bias=False, out_bias=False, windows=window_everywhere, mlps=mixtures.mixtral),
    ),
    "qwen2_moe": _decoder(
        Decoder(qkv_bias="qkv_bias", out_bias=False, windows=window_by_switch, mlps=mixtures.qwen),
        qkv_bias=True,
        shared_expert_intermediate_size=5632,
        **_QWEN,
    ),
    "qwen3_moe": _decoder(
        Decoder(
            qk_norm="head", windows=window_everywhere_by_switch, mlps=mixtures.qwen_without_shared
        ),
        **_QWEN,
    ),
    "olmoe": _decoder(Decoder(qk_norm="all", mlps=mixtures.mixtral), **_MHA),
    "phimoe": _decoder(
        Decoder(
            norm_bias=True,
            head_bias="lm_head_bias",
            windows=window_everywhere,
            mlps=mixtures.mixtral,
        ),
    ),
    "granitemoe": _decoder(Decoder(mlps=mixtures.mixtral), **_MHA),
    "gpt_oss": _decoder(
        Decoder(sinks=True, windows=window_except_every(2), mlps=mixtures.gpt_oss),
        attention_bias=True,
        sliding_window=128,
        head_dim=64,
    ),
    "glm4_moe": _decoder(
        Decoder(out_bias=False, qk_norm="head", qk_norm_key="use_qk_norm", mlps=mixtures.deepseek),
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "dots1": _decoder(
        Decoder(qk_norm="head", windows=window_except_every(None), mlps=mixtures.deepseek)
    ),
    "ernie4_5_moe": _decoder(
        Decoder(
            qkv_bias="use_bias", out_bias="use_bias", head_bias="use_bias", mlps=mixtures.ernie
        ),
        tie_word_embeddings=True,
        moe_layer_interval=1,
        moe_num_shared_experts=2,
    ),
    "minimax_m2": _decoder(
        Decoder(qkv_bias=False, out_bias=False, qk_norm="all", mlps=mixtures.mixtral), head_dim=128
    ),
    "llama4_text": _decoder(
        Decoder(windows=chunks, mlps=mixtures.llama4),
        no_rope_layer_interval=4,
        interleave_moe_layer_step=1,
        attention_chunk_size=8192,
        head_dim=128,
        num_experts_per_tok=1,
    ),
}

_DEEPSEEK = Decoder(latent=True, mlps=mixtures.deepseek)
_V3: dict[str, Any] = {"first_k_dense_replace": 3, "q_lora_rank": 1536, "n_shared_experts": 1}

LATENT: dict[str, Family] = {
    "deepseek_v2": _decoder(
        _DEEPSEEK, first_k_dense_replace=0, q_lora_rank=1536, n_shared_experts=2
    ),
    "deepseek_v3": _decoder(_DEEPSEEK, **_V3),
    "kimi_k2": _decoder(_DEEPSEEK, **_V3),
    "deepseek_v32": _decoder(Decoder(latent=True, indexed=True, mlps=mixtures.deepseek), **_V3),
    "glm4_moe_lite": _decoder(
        _DEEPSEEK, first_k_dense_replace=1, q_lora_rank=768, n_shared_experts=1
    ),
    "minicpm3": _decoder(
        Decoder(latent=True), tie_word_embeddings=True, q_lora_rank=768, v_head_dim=None
    ),
}

_DELTA_NET = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GEMMA = {
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "head_dim": 256,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}
_MAMBA2 = {"mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1}

HYBRID: dict[str, Family] = {
    "qwen3_next": Family(
        hybrids.qwen3_next,
        {**_DELTA_NET, "num_experts": 512, "shared_expert_intermediate_size": 512},
    ),
    "qwen3_5_text": Family(hybrids.qwen3_next, _DELTA_NET),
    "qwen3_5_moe_text": Family(
        hybrids.qwen3_next,
        {**_DELTA_NET, "num_experts": 256, "shared_expert_intermediate_size": 512},
    ),
    "lfm2": Family(
        hybrids.lfm2,
        {
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
    ),
    "lfm2_moe": Family(
        hybrids.lfm2, {"tie_word_embeddings": True, "conv_L_cache": 3, "num_experts": 32}
    ),
    "nemotron_h": Family(
        hybrids.nemotron_h,
        {"use_conv_bias": True, "n_groups": 8, "conv_kernel": 4, "head_dim": 128},
    ),
    "falcon_h1": Family(hybrids.falcon_h1, {**_MAMBA2, "mamba_d_ssm": 1024}),
    "granitemoehybrid": Family(hybrids.granite_hybrid, {**_MAMBA2, **_MHA, "num_local_experts": 8}),
    "bamba": Family(hybrids.granite_hybrid, _MAMBA2),
    "nemotron-nas": Family(hybrids.nemotron_nas),
    "deci": Family(hybrids.deci),
}

SHARED_KV: dict[str, Family] = {
    "gemma3n_text": Family(
        gemma.gemma3n,
        {**_GEMMA, "num_kv_shared_layers": 15, "altup_num_inputs": 4, "laurel_rank": 64},
    ),
    "gemma4_text": Family(gemma.gemma4, {**_GEMMA, "num_kv_shared_layers": 0}),
}

FAMILIES: dict[str, Family] = {
    **DENSE,
    **CLASSIC,
    **EXPERTS,
    **LATENT,
    **HYBRID,
    **SHARED_KV,
}
# Language models of families that take images, which transformers has as parts alone.
PARTS: dict[str, Family] = {
    "glm4v_text": Family(FAMILIES["glm4"].read, {"attention_bias": True}),
    "qwen2_5_vl": FAMILIES["qwen2"],
    "qwen2_5_vl_text": FAMILIES["qwen2"],
    "qwen2_vl": FAMILIES["qwen2"],
    "qwen2_vl_text": FAMILIES["qwen2"],
    "qwen3_vl_moe_text": FAMILIES["qwen3_moe"],
    "qwen3_vl_text": Family(
        FAMILIES["qwen3"].read, {**FAMILIES["qwen3"].defaults, "max_position_embeddings": 128_000}
    ),
}
_7B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
# Sizes that published models of text and images (LLaVA) leave out in their text_config.
TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {**_7B, "intermediate_size": 11008},
    "mistral": {**_7B, "intermediate_size": 14336, "num_key_value_heads": 8},
}
