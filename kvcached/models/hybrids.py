"""Families in which layers of attention alternate with recurrences or short convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Heads
from kvcached.models import mixtures
from kvcached.models.config_keys import ConfigKeys, check_length
from kvcached.models.decoders import FULL, GATED, model_shape
from kvcached.models.parts import (
    DeltaNet,
    Mamba2,
    attention,
    experts,
    heads_of,
    linear,
    mlp,
    pair_flops,
    split,
)
from kvcached.models.shape import LayerShape, Mlp, ModelShape, State

LINEAR, CONV = "linear_attention", "conv"
_NO_MLP = Mlp(0)
# Names that layers had before transformers 5.
_RENAMED = {"mamba": LINEAR, "attention": FULL}


def _layer(
    mixer: int,
    dense: Mlp = _NO_MLP,
    *,
    norms: int,
    heads: int = 0,
    kv: Heads | None = None,
    state: State | None = None,
) -> LayerShape:
    flops = pair_flops(heads, kv) if kv else 0
    return LayerShape(mixer + norms, dense, heads, flops, kv, state=state)


def qwen3_next(keys: ConfigKeys) -> ModelShape:
    """Reads gated delta nets, and full attention with an output gate in every fourth layer."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    every = keys.integer("full_attention_interval", default=4)
    usual = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    kinds = keys.kinds("layer_types", layers, {LINEAR, FULL}, usual)
    heads, kv = heads_of(keys)
    bias = keys.flag("attention_bias")
    full = attention(
        hidden, heads, kv, qkv_bias=bias, out_bias=bias, qk_norm="head", output_gate=True
    )
    delta = DeltaNet.read(keys)
    has_experts = keys.get("num_experts")
    mlps = mixtures.qwen(keys, layers) if has_experts else GATED(keys, layers)

    def one(kind: str, dense: Mlp) -> LayerShape:
        if kind == LINEAR:
            return _layer(delta.parameters(hidden), dense, norms=2 * hidden, state=delta.state)
        return _layer(full, dense, norms=2 * hidden, heads=heads, kv=kv)

    return model_shape(keys, list(map(one, kinds, mlps)), other=hidden)


def lfm2(keys: ConfigKeys) -> ModelShape:
    """Reads LFM2: short convolutions, and attention in `layer_types` or `full_attn_idxs`."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    full_layers = keys.integers("full_attn_idxs") or ()
    usual = [FULL if i in full_layers else CONV for i in range(layers)] if full_layers else None
    kinds = keys.kinds("layer_types", layers, {CONV, FULL}, usual)
    heads, kv = heads_of(keys)
    full = attention(hidden, heads, kv, qk_norm="head")
    kernel, bias = keys.integer("conv_L_cache"), keys.flag("conv_bias")
    conv = linear(hidden, 3 * hidden, bias) + linear(hidden, hidden, bias)
    conv += hidden * (kernel + (1 if bias else 0))
    state = State(hidden * (kernel - 1), heads=hidden)

    def one(kind: str, dense: Mlp) -> LayerShape:
        if kind == CONV:
            return _layer(conv, dense, norms=2 * hidden, state=state)
        return _layer(full, dense, norms=2 * hidden, heads=heads, kv=kv)

    return model_shape(keys, list(map(one, kinds, _lfm2_mlps(keys, layers))), other=hidden)


def _lfm2_mlps(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    hidden, ffn = keys.integer("hidden_size"), keys.integer("block_ff_dim", "intermediate_size")
    if keys.get("num_experts"):
        number, used = keys.integer("num_experts"), keys.integer("num_experts_per_tok")
        first = keys.count("num_dense_layers")
        sparse = experts(hidden, number, used, mlp(hidden, keys.integer("moe_intermediate_size")))
        return [mlp(hidden, ffn) if i < first else sparse for i in range(layers)]
    if keys.flag("block_auto_adjust_ff_dim"):
        unit = keys.integer("block_multiple_of")
        ffn = int(keys.number("block_ffn_dim_multiplier") * int(2 * ffn / 3))
        ffn = -(-ffn // unit) * unit
    return [mlp(hidden, ffn)] * layers


def nemotron_h(keys: ConfigKeys) -> ModelShape:
    """Reads Nemotron-H: one mixer a layer, by `hybrid_override_pattern` or `layers_block_type`."""
    hidden = keys.integer("hidden_size")
    kinds = _nemotron_kinds(keys)
    keys.get("n_routed_experts")  # saved for models without experts, too
    heads, kv = heads_of(keys)
    bias, mlp_bias = keys.flag("use_bias"), keys.flag("mlp_bias")
    mamba = Mamba2(
        inner=keys.integer("mamba_num_heads") * keys.integer("mamba_head_dim"),
        heads=keys.integer("mamba_num_heads"),
        groups=keys.integer("mamba_n_groups", "n_groups"),
        state_size=keys.integer("ssm_state_size"),
        kernel=keys.integer("mamba_d_conv", "conv_kernel"),
        conv_bias=keys.flag("use_conv_bias"),
        in_bias=bias,
        out_bias=bias,
    )

    def one(kind: str) -> LayerShape:
        if kind == LINEAR:
            return _layer(mamba.parameters(hidden), norms=hidden, state=mamba.state)
        if kind == FULL:
            weights = attention(hidden, heads, kv)
            return _layer(weights, norms=hidden, heads=heads, kv=kv)
        if kind == "moe":
            return _layer(0, _nemotron_experts(keys), norms=hidden)
        ffn = keys.integer("intermediate_size")
        return _layer(0, mlp(hidden, ffn, gated=False, bias=mlp_bias), norms=hidden)

    return model_shape(keys, list(map(one, kinds)), other=hidden)


def _nemotron_kinds(keys: ConfigKeys) -> Sequence[str]:
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    pattern = keys.get("hybrid_override_pattern")
    listed = keys.texts("layers_block_type") or keys.texts("layer_types")
    if listed is not None:
        kinds = [_RENAMED.get(kind, kind) for kind in listed]
    elif isinstance(pattern, str) and pattern:
        kinds = [letters.get(letter, letter) for letter in pattern]
    else:
        raise InvalidArgumentError("config.json lacks hybrid_override_pattern; complete the file")
    if unknown := sorted(set(kinds) - set(letters.values())):
        raise InvalidArgumentError(
            f"config.json has layers {', '.join(unknown)}, which nemotron_h models do not have"
        )
    return kinds


def _nemotron_experts(keys: ConfigKeys) -> Mlp:
    hidden, bias = keys.integer("hidden_size"), keys.flag("mlp_bias")
    number, used = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok")
    latent = keys.optional("moe_latent_size")
    each = mlp(latent or hidden, keys.integer("moe_intermediate_size"), gated=False)
    shared_ffn = keys.integer("moe_shared_expert_intermediate_size")
    shared = mlp(hidden, shared_ffn, gated=False, bias=bias).parameters
    if latent:
        shared += linear(hidden, latent, bias) + linear(latent, hidden, bias)
    return experts(hidden, number, used, each, shared=shared)


def _mamba2(keys: ConfigKeys, inner: int, *, norm: bool = True, out: str) -> Mamba2:
    """Returns the mixer whose keys begin with `mamba_`."""
    return Mamba2(
        inner=inner,
        heads=keys.integer("mamba_n_heads"),
        groups=keys.integer("mamba_n_groups"),
        state_size=keys.integer("mamba_d_state"),
        kernel=keys.integer("mamba_d_conv"),
        conv_bias=keys.flag("mamba_conv_bias"),
        in_bias=keys.flag("mamba_proj_bias"),
        out_bias=keys.flag(out),
        norm=norm,
    )


def falcon_h1(keys: ConfigKeys) -> ModelShape:
    """Reads Falcon-H1: attention and Mamba-2 side by side in every layer."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    heads, kv = heads_of(keys)
    bias = keys.flag("attention_bias")
    inner = keys.optional("mamba_d_ssm") or keys.integer("mamba_expand") * hidden
    norm = keys.flag("mamba_rms_norm")
    mamba = _mamba2(keys, inner, norm=norm, out="projectors_bias")
    mixers = mamba.parameters(hidden)
    mixers += attention(hidden, heads, kv, qkv_bias=bias, out_bias=bias)
    made = [
        _layer(mixers, dense, norms=2 * hidden, heads=heads, kv=kv, state=mamba.state)
        for dense in GATED(keys, layers)
    ]
    return model_shape(keys, made, other=hidden)


def granite_hybrid(keys: ConfigKeys) -> ModelShape:
    """Reads Granite 4 and Bamba: Mamba-2 or attention, then experts, a shared MLP, or both."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    full_layers = keys.integers("attn_layer_indices") or ()
    usual = [FULL if i in full_layers else LINEAR for i in range(layers)]
    name = "layers_block_type" if keys.get("layers_block_type") else "layer_types"
    listed = keys.kinds(name, layers, {LINEAR, FULL, *_RENAMED}, usual)
    kinds = [_RENAMED.get(kind, kind) for kind in listed]
    heads, kv = heads_of(keys)
    bias = keys.flag("attention_bias")
    full = attention(hidden, heads, kv, qkv_bias=bias, out_bias=bias)
    mamba = _mamba2(keys, keys.integer("mamba_expand") * hidden, out="mamba_proj_bias")
    dense = _granite_mlp(keys)

    def one(kind: str) -> LayerShape:
        if kind == LINEAR:
            return _layer(mamba.parameters(hidden), dense, norms=2 * hidden, state=mamba.state)
        return _layer(full, dense, norms=2 * hidden, heads=heads, kv=kv)

    return model_shape(keys, list(map(one, kinds)), other=hidden)


def _granite_mlp(keys: ConfigKeys) -> Mlp:
    hidden, shared_ffn = keys.integer("hidden_size"), keys.optional("shared_intermediate_size")
    if shared_ffn is None:
        return GATED(keys, 1)[0]
    shared = mlp(hidden, shared_ffn)
    if not keys.count("num_local_experts", default=0):
        return shared
    each = mlp(hidden, keys.integer("intermediate_size"))
    number, used = keys.integer("num_local_experts"), keys.integer("num_experts_per_tok")
    return experts(hidden, number, used, each, shared=shared.parameters)


def nemotron_nas(keys: ConfigKeys) -> ModelShape:
    """Reads Nemotron-NAS: each layer's attention and MLP in `block_configs`."""
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    blocks = keys.objects("block_configs")
    if not blocks:
        raise InvalidArgumentError("config.json lacks block_configs; complete the file")
    check_length("block_configs", blocks, keys.layers("num_hidden_layers"))
    made = [_nas_layer(hidden, heads, block) for block in blocks]
    return model_shape(keys, made, other=hidden)


def deci(keys: ConfigKeys) -> ModelShape:
    """Reads DeciLM: Llama with another number of K and V heads in each layer."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    heads = keys.integer("num_attention_heads")
    listed = keys.integers("num_key_value_heads_per_layer") or ()
    check_length("num_key_value_heads_per_layer", listed, layers)
    each = [Heads(kv_heads, split(hidden, heads)) for kv_heads in listed]
    made = [
        _layer(attention(hidden, heads, kv), dense, norms=2 * hidden, heads=heads, kv=kv)
        for kv, dense in zip(each, GATED(keys, layers), strict=True)
    ]
    return model_shape(keys, made, other=hidden)


def _nas_layer(hidden: int, heads: int, block: Mapping[str, Any]) -> LayerShape:
    attn, ffn = (ConfigKeys(block.get(part) or {}, {}) for part in ("attention", "ffn"))
    kv, mixer, norms = None, 0, 0
    if attn.flag("replace_with_linear"):
        mixer, norms = linear(hidden, hidden), hidden
    elif not attn.flag("no_op"):
        kv = Heads(heads // attn.integer("n_heads_in_group"), split(hidden, heads))
        mixer, norms = attention(hidden, heads, kv), hidden
    dense = _NO_MLP
    if ffn.flag("replace_with_linear"):
        dense, norms = Mlp(hidden * hidden), norms + hidden
    elif not ffn.flag("no_op"):
        size = int(2 * ffn.number("ffn_mult") * hidden / 3)
        dense, norms = mlp(hidden, -(-size // 256) * 256), norms + hidden
    return _layer(mixer, dense, norms=norms, heads=heads if kv else 0, kv=kv)
