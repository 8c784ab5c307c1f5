"""Readers of Gemma 3n and 4, which have layers that read another layer's K and V."""

from __future__ import annotations

from collections.abc import Sequence

from kvcached.errors import InvalidArgumentError
from kvcached.layouts.attention import Heads
from kvcached.models.config_keys import ConfigKeys, check_length
from kvcached.models.decoders import FULL, SLIDING, all_but_each, model_shape
from kvcached.models.parts import experts, heads_of, linear, mlp, pair_flops
from kvcached.models.shape import LayerShape, Mlp, ModelShape


def _kinds(keys: ConfigKeys, layers: int, every: int) -> list[str]:
    usual = all_but_each(keys, layers, every)
    return list(keys.kinds("layer_types", layers, {FULL, SLIDING}, usual))


def _first_shared(keys: ConfigKeys, layers: int) -> int:
    """Returns the first of the layers that read the K and V of others."""
    shared = keys.count("num_kv_shared_layers")
    if shared >= layers:
        raise InvalidArgumentError(
            f"config.json has num_kv_shared_layers {shared} for {layers} layers; correct one of"
            " them"
        )
    return layers - shared


def _attention(hidden: int, heads: int, kv: Heads, *, shared: bool, v: bool = True) -> int:
    """Returns the parameters with norms of Q and K. A `shared` layer has neither K nor V."""
    q, one = heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
    own = 0 if shared else linear(hidden, one * (2 if v else 1)) + kv.head_dim
    return 2 * linear(hidden, q) + kv.head_dim + own


def _unused(hidden: int, heads: int, kv: Heads, *, shared: bool, v: bool = True) -> int:
    """Returns the numbers of projections that engines add to those of `_attention`."""
    whole = _attention(hidden, heads, kv, shared=False)
    return whole - _attention(hidden, heads, kv, shared=shared, v=v)


def _per_layer_inputs(hidden: int, width: int) -> int:
    """Returns a layer's parameters for its own embedding of a token, of `width` numbers."""
    return 2 * linear(hidden, width) + hidden if width else 0


def _model(keys: ConfigKeys, made: list[LayerShape], other: int) -> ModelShape:
    hidden, width = keys.integer("hidden_size"), keys.count("hidden_size_per_layer_input")
    tables = 0
    if width:
        tables = keys.integer("vocab_size_per_layer_input") * len(made) * width
        other += linear(hidden, len(made) * width) + width
    return model_shape(keys, made, other=other + hidden, positions=tables)


def gemma3n(keys: ConfigKeys) -> ModelShape:
    """Reads Gemma 3n, whose last `num_kv_shared_layers` keep no KV, with AltUp and LAuReL."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    heads, kv = heads_of(keys)
    first_shared = _first_shared(keys, layers)
    copies, rank = keys.integer("altup_num_inputs"), keys.integer("laurel_rank")
    altup = hidden * (copies + 2) + copies**2 + copies**3
    laurel = 2 * linear(hidden, rank) + hidden
    common = altup + laurel + 4 * hidden
    common += _per_layer_inputs(hidden, keys.count("hidden_size_per_layer_input"))
    ffns = _by_layer(keys, "intermediate_size", layers)

    def one(layer: int, kind: str) -> LayerShape:
        shared = layer >= first_shared
        mixer = common + _attention(hidden, heads, kv, shared=shared)
        window = keys.integer("sliding_window") if kind == SLIDING else None
        flops = pair_flops(heads, kv)
        return LayerShape(
            mixer,
            mlp(hidden, ffns[layer]),
            heads,
            flops,
            None if shared else kv,
            window,
            absorbed=_unused(hidden, heads, kv, shared=shared),
        )

    made = [one(i, kind) for i, kind in enumerate(_kinds(keys, layers, 5))]
    return _model(keys, made, other=2 * (copies - 1) * linear(hidden, hidden))


def _by_layer(keys: ConfigKeys, name: str, layers: int) -> Sequence[int]:
    """Returns a size for each layer. The file has one for all, or a list."""
    listed = keys.integers(name) if isinstance(keys.get(name), list) else None
    if listed is None:
        return [keys.integer(name)] * layers
    check_length(name, listed, layers)
    return listed


def gemma4(keys: ConfigKeys) -> ModelShape:
    """Reads Gemma 4: wider heads in layers of full attention, whose V may be their K."""
    hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
    heads, _ = heads_of(keys)
    first_shared = _first_shared(keys, layers)
    sparse = _gemma4_experts(keys) if keys.flag("enable_moe_block") else Mlp(0)
    common = 4 * hidden + _per_layer_inputs(hidden, keys.count("hidden_size_per_layer_input"))

    def one(layer: int, kind: str) -> LayerShape:
        shared, full = layer >= first_shared, kind == FULL
        kv = _gemma4_heads(keys, layer, full=full)
        wide = 2 if shared and keys.flag("use_double_wide_mlp") else 1
        dense = mlp(hidden, keys.integer("intermediate_size") * wide).parameters
        has_v = not (full and keys.flag("attention_k_eq_v"))
        mixer = common + dense + _attention(hidden, heads, kv, shared=shared, v=has_v)
        window = None if full else keys.integer("sliding_window")
        own = None if shared else kv
        unused = _unused(hidden, heads, kv, shared=shared, v=has_v)
        flops = pair_flops(heads, kv)
        return LayerShape(mixer, sparse, heads, flops, own, window, absorbed=unused)

    kinds = _kinds(keys, layers, 6)
    kinds[-1] = FULL
    return _model(keys, [one(i, kind) for i, kind in enumerate(kinds)], other=0)


def _gemma4_heads(keys: ConfigKeys, layer: int, *, full: bool) -> Heads:
    """Returns a layer's K and V heads: in `per_layer_config`, or the keys of full layers."""
    own = keys.by_layer("per_layer_config")
    kv_heads, dim = keys.integer("num_key_value_heads"), keys.integer("head_dim")
    if own is not None:
        changed = ConfigKeys(own.get(layer, {}), {"num_key_value_heads": kv_heads, "head_dim": dim})
        return Heads(changed.integer("num_key_value_heads"), changed.integer("head_dim"))
    if full:
        dim = keys.integer("global_head_dim", default=512)
        if keys.flag("attention_k_eq_v"):
            kv_heads = keys.integer("num_global_key_value_heads", default=kv_heads)
    return Heads(kv_heads, dim)


def _gemma4_experts(keys: ConfigKeys) -> Mlp:
    hidden, number = keys.integer("hidden_size"), keys.integer("num_experts")
    each = mlp(hidden, keys.integer("moe_intermediate_size"))
    router, norms = linear(hidden, number) + hidden + number, 3 * hidden
    return experts(hidden, number, keys.integer("top_k_experts"), each, shared=norms, router=router)
