"""Reading of a config.json (Hugging Face's keys): the model's shape, and the layout of its KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvcached.checks import checked, instance_of, positive, text
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Heads, Latent, Layout, MixedLayout, MLALayout
from kvcached.layouts.base import DTYPE_BYTES, KVLayout
from kvcached.layouts.hybrid import HybridLayout, LayerGroup
from kvcached.models.config_keys import ConfigKeys, check_length, shown, wrong
from kvcached.models.families import FAMILIES, PARTS, TEXT_DEFAULTS
from kvcached.models.shape import LayerShape, ModelShape

# Keys that change what a model keeps or weighs. One that a family does not know is an error.
_SHAPING = (
    "kv_lora_rank",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
    "num_key_value_heads_per_layer",
    "num_kv_shared_layers",
    "block_configs",
    "hybrid_override_pattern",
    "full_attn_idxs",
    "attn_layer_indices",
    "cross_attention_layers",
    "index_topk",
    "moe_layer_freq",
)


# Kinds of layers that keep all tokens, whatever they attend to.
_FULL = {"full_attention", "indexed_attention"}


@checked(config=instance_of(Mapping))
def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of the decoder that a config.json describes.

    It is read by the model's `model_type`; the text model's part of a multimodal one is used.
    Raises InvalidArgumentError for families that are not known, and with the key for missing and
    wrong values. Nothing is guessed.
    """
    part = config.get("text_config") or config
    if not isinstance(part, Mapping):
        raise wrong("text_config", part, "an object")
    kind = part.get("model_type")
    if kind is None:
        raise InvalidArgumentError("config.json lacks model_type; complete the file")
    if not isinstance(kind, str) or (kind not in FAMILIES and kind not in PARTS):
        raise InvalidArgumentError(
            f"config.json has model_type {shown(kind)}, a family whose sizes are not known; give a"
            f" model of {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES.get(kind) or PARTS[kind]
    # The whole model's key decides, as in transformers.
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    left_out = {} if part is config else TEXT_DEFAULTS.get(kind, {})
    values = {**left_out, **part, **tied, "dtype": _dtype(part, config)}
    keys = ConfigKeys(values, {"tie_word_embeddings": False, **family.defaults})
    shape = family.read(keys)
    if strange := keys.unread(_SHAPING) or _special_layers(keys, len(shape.layers)):
        raise InvalidArgumentError(
            f"config.json has {strange} {shown(keys.get(strange))}, which changes no {kind} model;"
            " remove the key, or correct model_type"
        )
    return shape


def _special_layers(keys: ConfigKeys, layers: int) -> str:
    """Returns "layer_types" if it names layers that the family's reader did not look for."""
    name = keys.unread(("layer_types",))
    if not name:
        return ""
    kinds = keys.texts(name) or ()
    check_length(name, kinds, layers)
    return "" if _FULL.issuperset(kinds) else name


def _dtype(part: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    named = (place.get(key) for place in (part, config) for key in ("dtype", "torch_dtype"))
    known = (dtype for dtype in named if isinstance(dtype, str) and dtype in DTYPE_BYTES)
    return next(known, "bfloat16")


@checked(config=instance_of(Mapping), dtype=text, block_tokens=positive, ranks=positive)
def layout_of_config(
    config: Mapping[str, Any], dtype: str | None = None, block_tokens: int = 16, ranks: int = 1
) -> KVLayout | HybridLayout:
    """Returns a per-layer layout of the KV of all layers that keep any, on each of `ranks`
    tensor-parallel ranks.

    `dtype` is the KV cache's (None: the model's own). Layers are numbered without those that keep
    no KV. What a layer keeps per sequence is in `shape_of_config(config).state_bytes`. Raises the
    errors of `shape_of_config`, and InvalidArgumentError for models that keep no KV at all.
    """
    return layout_of_shape(shape_of_config(config).kept_by_rank(ranks), dtype, block_tokens)


def layout_of_shape(
    shape: ModelShape, dtype: str | None = None, block_tokens: int = 16
) -> KVLayout | HybridLayout:
    """Returns the layout of `layout_of_config` for a shape."""
    kept = [layer for layer in shape.layers if layer.kv is not None]
    if not kept:
        raise InvalidArgumentError(f"{shape.model_type} models keep no KV: none of their layers")
    dtype = dtype or shape.dtype
    windows = sorted({layer.window_tokens for layer in kept if layer.window_tokens is not None})
    groups = [
        _group(kept, window, dtype, block_tokens, len(windows)) for window in (None, *windows)
    ]
    found = tuple(group for group in groups if group is not None)
    if len(found) == 1 and found[0].window_tokens is None:
        return found[0].layout
    return HybridLayout(found)


def _group(
    layers: list[LayerShape], window: int | None, dtype: str, block_tokens: int, windows: int
) -> LayerGroup | None:
    """Returns the layers with this window, if there are any."""
    numbers = tuple(i for i, layer in enumerate(layers) if layer.window_tokens == window)
    if not numbers:
        return None
    kinds = [layers[i].kv for i in numbers]
    layout = _layout([kind for kind in kinds if kind is not None], dtype, block_tokens)
    if isinstance(layout, MLALayout):  # an index is in all layers of a model or in none
        layout = replace(layout, index_bytes=layers[numbers[0]].index_bytes)
    name = "full" if window is None else "window" if windows == 1 else f"window {window}"
    return LayerGroup(name, numbers, layout, window)


def _layout(kinds: list[Heads | Latent], dtype: str, block_tokens: int) -> KVLayout:
    first = kinds[0]
    if any(kind != first for kind in kinds):
        return MixedLayout(tuple(kinds), dtype=dtype, block_tokens=block_tokens)
    if isinstance(first, Latent):
        return MLALayout(
            len(kinds), first.kv_lora_rank, first.rope_dim, dtype=dtype, block_tokens=block_tokens
        )
    return Layout(
        len(kinds),
        first.num_kv_heads,
        first.head_dim,
        first.v_head_dim,
        dtype=dtype,
        block_tokens=block_tokens,
    )
