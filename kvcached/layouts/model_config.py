"""Layout for a model's config.json (Hugging Face's keys)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcached.checks import checked, each, instance_of, not_negative, positive, text
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Heads, Layout, MixedLayout, MLALayout
from kvcached.layouts.base import DTYPE_BYTES, KVLayout
from kvcached.layouts.hybrid import HybridLayout, LayerGroup

# Model type -> length of a group of layers whose last layer is full, if the file lists no layers.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@checked(config=instance_of(Mapping), dtype=text, block_tokens=positive)
def layout_of_config(
    config: Mapping[str, Any], dtype: str | None = None, block_tokens: int = 16
) -> KVLayout | HybridLayout:
    """Returns a per-layer layout. `dtype` is the KV cache's (None: the model's own).

    Supports MHA, GQA and MQA, heads that differ by layer, latent attention (`kv_lora_rank`) and
    sliding windows (`layer_types`, or `sliding_window` and its pattern). Raises
    InvalidArgumentError with the key for missing values and for layers without KV.
    """
    model = instance_of(Mapping)("text_config", config.get("text_config") or config)
    if dtype is None:
        named = model.get("dtype") or model.get("torch_dtype") or config.get("torch_dtype")
        dtype = named if isinstance(named, str) and named in DTYPE_BYTES else "bfloat16"
    layout = _all_layers(model, dtype, block_tokens)
    kinds = _kinds(model, layout.layer_count)
    if _SLIDING not in kinds:
        return layout
    window_tokens = _integer(model, "sliding_window")
    window = [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]
    if len(window) < len(kinds):
        return HybridLayout.sliding(layout, window, window_tokens)
    return HybridLayout((LayerGroup("window", tuple(window), layout, window_tokens),))


def _all_layers(model: Mapping[str, Any], dtype: str, block_tokens: int) -> KVLayout:
    layers = _integer(model, "num_hidden_layers", "n_layer")
    if model.get("kv_lora_rank"):
        rank, rope = _integer(model, "kv_lora_rank"), _integer(model, "qk_rope_head_dim")
        return MLALayout(layers, rank, rope, dtype=dtype, block_tokens=block_tokens)
    heads = _integer(model, "num_attention_heads", "n_head")
    head_dim = model.get("head_dim") or _integer(model, "hidden_size", "n_embd") // heads
    v_head_dim = model.get("v_head_dim")
    by_layer = model.get("num_key_value_heads_per_layer")
    if by_layer:
        by_layer = each(positive)("num_key_value_heads_per_layer", by_layer)
        kept = tuple(Heads(kv_heads, head_dim, v_head_dim) for kv_heads in by_layer)
        return MixedLayout(kept, dtype=dtype, block_tokens=block_tokens)
    kv_heads = model.get("num_key_value_heads") or heads
    return Layout(layers, kv_heads, head_dim, v_head_dim, dtype=dtype, block_tokens=block_tokens)


def _kinds(model: Mapping[str, Any], layers: int) -> list[str]:
    """Returns the kind of attention of each layer."""
    listed = model.get("layer_types")
    if listed:
        unknown = set(each(text)("layer_types", listed)) - {_FULL, _SLIDING}
        if unknown or len(listed) != layers:
            raise InvalidArgumentError(
                f"layer_types must hold {_FULL} or {_SLIDING} for each of the {layers} layers, not "
                f"{', '.join(sorted(unknown)) or len(listed)}; make a LayerGroup for each kind"
            )
        return list(listed)
    if not model.get("sliding_window") or model.get("use_sliding_window") is False:
        return [_FULL] * layers
    kind = model.get("model_type")
    usual = _FULL_EVERY.get(kind) if isinstance(kind, str) else None
    every = model.get("sliding_window_pattern") or usual
    if every:
        positive("sliding_window_pattern", every)
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    first = model.get("max_window_layers", 0) if model.get("use_sliding_window") else 0
    not_negative("max_window_layers", first)
    return [_SLIDING if layer >= first else _FULL for layer in range(layers)]


def _integer(model: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = model.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise InvalidArgumentError(f"config.json lacks a positive {names[0]}; add it to the file")
