"""Readers of families before Llama: biases, plain MLPs, learned or no positions."""

from __future__ import annotations

from kvcached.layouts.attention import Heads
from kvcached.models.config_keys import ConfigKeys
from kvcached.models.decoders import model_shape
from kvcached.models.parts import attention, linear, mlp, pair_flops, split
from kvcached.models.shape import LayerShape, Mlp, ModelShape


def _uniform(parameters: int, heads: int, kv: Heads, layers: int) -> list[LayerShape]:
    return [LayerShape(parameters, Mlp(0), heads, pair_flops(heads, kv), kv)] * layers


def gpt2(keys: ConfigKeys) -> ModelShape:
    """Reads GPT-2, and GPT-BigCode with its single head of K and V (`multi_query`)."""
    hidden, heads = keys.integer("n_embd"), keys.integer("n_head")
    kv = Heads(1 if keys.flag("multi_query") else heads, split(hidden, heads))
    weights = attention(hidden, heads, kv, qkv_bias=True, out_bias=True)
    ffn = keys.integer("n_inner", default=4 * hidden)
    total = weights + mlp(hidden, ffn, gated=False, bias=True).parameters + 4 * hidden
    positions = keys.integer("n_positions") * hidden
    layers = _uniform(total, heads, kv, keys.layers("n_layer"))
    return model_shape(keys, layers, other=2 * hidden, positions=positions)


def gptj(keys: ConfigKeys) -> ModelShape:
    """Reads GPT-J: attention and MLP in parallel after one norm."""
    hidden, heads = keys.integer("n_embd"), keys.integer("n_head")
    kv = Heads(heads, split(hidden, heads))
    ffn = keys.integer("n_inner", default=4 * hidden)
    dense = mlp(hidden, ffn, gated=False, bias=True).parameters
    layers = _uniform(
        attention(hidden, heads, kv) + dense + 2 * hidden, heads, kv, keys.layers("n_layer")
    )
    return model_shape(keys, layers, other=2 * hidden, head_bias=True)


def opt(keys: ConfigKeys) -> ModelShape:
    """Reads OPT, whose embedding may be narrower than its layers."""
    hidden, heads, bias = (
        keys.integer("hidden_size"),
        keys.integer("num_attention_heads"),
        keys.flag("enable_bias"),
    )
    width = keys.integer("word_embed_proj_dim", default=hidden)
    kv, norm = Heads(heads, split(hidden, heads)), 2 * hidden
    weights = attention(hidden, heads, kv, qkv_bias=bias, out_bias=bias)
    dense = mlp(hidden, keys.integer("ffn_dim"), gated=False, bias=bias).parameters
    total = weights + dense + 2 * norm
    positions = (keys.integer("max_position_embeddings") + 2) * hidden
    ends = 2 * linear(width, hidden) if width != hidden else 0
    final = norm if keys.flag("do_layer_norm_before") else 0
    layers = _uniform(total, heads, kv, keys.layers("num_hidden_layers"))
    return model_shape(keys, layers, other=ends + final, positions=positions, width=width)


def bloom(keys: ConfigKeys) -> ModelShape:
    """Reads BLOOM: ALiBi in place of positions, and a norm of the embeddings."""
    hidden = keys.integer("hidden_size", "n_embed")
    heads = keys.integer("n_head", "num_attention_heads")
    kv = Heads(heads, split(hidden, heads))
    weights = attention(hidden, heads, kv, qkv_bias=True, out_bias=True)
    dense = mlp(hidden, 4 * hidden, gated=False, bias=True).parameters
    count = keys.layers("n_layer", "num_hidden_layers")
    layers = _uniform(weights + dense + 4 * hidden, heads, kv, count)
    return model_shape(keys, layers, other=4 * hidden)


def falcon(keys: ConfigKeys) -> ModelShape:
    """Reads Falcon. Its K and V heads are `num_kv_heads` with `new_decoder_architecture`, else one
    with `multi_query`."""
    hidden = keys.integer("hidden_size", "n_embed")
    heads, bias = keys.integer("num_attention_heads", "n_head"), keys.flag("bias")
    newer = keys.flag("new_decoder_architecture")
    if newer:
        kv_heads = keys.integer("num_kv_heads", default=heads)
    else:
        kv_heads = 1 if keys.flag("multi_query") else heads
    kv = Heads(kv_heads, split(hidden, heads))
    weights = attention(hidden, heads, kv, qkv_bias=bias, out_bias=bias)
    ffn = keys.integer("ffn_hidden_size", default=4 * hidden)
    dense = mlp(hidden, ffn, gated=False, bias=bias).parameters
    parallel = keys.flag("parallel_attn")
    norms = keys.integer("num_ln_in_parallel_attn", default=2 if newer else 1) if parallel else 2
    count = keys.layers("num_hidden_layers", "n_layer")
    layers = _uniform(weights + dense + norms * 2 * hidden, heads, kv, count)
    return model_shape(keys, layers, other=2 * hidden)
