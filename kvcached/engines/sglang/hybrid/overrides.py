"""Keys of models' config.json that SGLang must read otherwise than they are.

The module does not import SGLang, which takes seconds.
"""

from __future__ import annotations

from typing import Any

from kvcached.models import shape_of_config

# Families whose layers with windows have a separate pool.
WINDOW_POOLS = frozenset({"cohere2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss"})
# Classes of SGLang that compute a family under another name than transformers'.
CLASSES = {"dots1": "Glm4MoeForCausalLM", "phimoe": "PhiMoEForCausalLM"}
# Families with full attention in each nth layer, whose n transformers 5 no longer saves.
_LINEAR_ATTENTION = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})


def overrides(config: dict[str, Any]) -> dict[str, Any]:
    """Returns keys of a config.json that SGLang must read otherwise than they are.

    It needs `hidden_act` of Gemma 2, which transformers 5 no longer saves, takes Cohere 2's window
    as the tokens before a token, without itself, and gives windows a separate pool only where
    the config says so. It reads other keys than transformers for Exaone 4 and Nemotron-H.
    """
    kind, changed = config.get("model_type"), dict[str, Any]()
    rope = config.get("rope_parameters") or {}
    if kind in CLASSES:
        changed["architectures"] = [CLASSES[kind]]
    if kind == "gemma2" and "hidden_act" not in config:
        changed["hidden_act"] = config.get("hidden_activation") or "gelu_pytorch_tanh"
    if kind == "cohere2" and (window := config.get("sliding_window", 4096)):
        changed["sliding_window"] = window - 1
    if kind in _LINEAR_ATTENTION:
        changed |= _linear_attention(config, rope)
    if kind == "dots1":  # differs from GLM-4-MoE in these
        changed |= {"use_qk_norm": True, "partial_rotary_factor": 1.0}
    if kind == "exaone4":
        every = full_every(config)
        changed["sliding_window_pattern"] = "L" * (every - 1) + "G" if every > 1 else None
        changed["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    if kind == "nemotron_h" and "n_groups" in config:
        changed["mamba_n_groups"] = config["n_groups"]
    if kind == "olmo3" and "full_attention" in rope:
        changed["rope_parameters"] = rope["full_attention"]
    if kind in WINDOW_POOLS:
        slides = [bool(layer.window_tokens) for layer in shape_of_config(config).layers]
        if len(set(slides)) > 1:
            pattern = [int(slide) for slide in slides]
            changed |= {"is_hybrid_swa": True, "hybrid_layer_pattern": pattern}
    return changed


def _linear_attention(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model with linear attention, which SGLang reads by former names."""
    changed = {}
    if "partial_rotary_factor" in rope:
        changed["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if "full_attention_interval" not in config:
        attends = [bool(layer.kv) for layer in shape_of_config(config).layers]
        changed["full_attention_interval"] = attends.index(True) + 1
    return changed


def full_every(config: dict[str, Any]) -> int:
    """Returns the n of a model with full attention in each nth layer, 0 for other models."""
    slides = [bool(layer.window_tokens) for layer in shape_of_config(config).layers]
    every = (*slides, False).index(False) + 1
    return every if slides == [bool((i + 1) % every) for i in range(len(slides))] else 0
