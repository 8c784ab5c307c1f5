"""MLPs of mixtures of experts: which layers have them, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcached.models.config_keys import ConfigKeys
from kvcached.models.parts import experts, linear, mlp
from kvcached.models.shape import Mlp


def mixtral(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns the same experts for every layer, of `intermediate_size`."""
    hidden = keys.integer("hidden_size")
    each = mlp(hidden, keys.integer("intermediate_size"))
    number = keys.integer("num_local_experts", "num_experts")
    return [experts(hidden, number, keys.integer("num_experts_per_tok"), each)] * layers


def gpt_oss(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns experts and a router with biases."""
    hidden, number = keys.integer("hidden_size"), keys.integer("num_local_experts")
    each = mlp(hidden, keys.integer("intermediate_size"), bias=True)
    router = linear(hidden, number, bias=True)
    used = keys.integer("num_experts_per_tok")
    return [experts(hidden, number, used, each, router=router)] * layers


def qwen(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns Qwen's experts with a shared expert of `shared_expert_intermediate_size`."""
    return _qwen(keys, layers, keys.count("shared_expert_intermediate_size"))


def qwen_without_shared(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns the experts of Qwen3, without a shared expert."""
    return _qwen(keys, layers, 0)


def _qwen(keys: ConfigKeys, layers: int, shared_ffn: int) -> Sequence[Mlp]:
    """Returns experts in every `decoder_sparse_step`-th layer, but for `mlp_only_layers`.

    A shared expert has a gate.
    """
    hidden = keys.integer("hidden_size")
    dense_layers = keys.integers("mlp_only_layers") or ()
    step = keys.integer("decoder_sparse_step", default=1)
    sparse = experts(
        hidden,
        keys.integer("num_experts", "num_local_experts"),
        keys.integer("num_experts_per_tok"),
        mlp(hidden, keys.integer("moe_intermediate_size")),
        shared=mlp(hidden, shared_ffn).parameters + hidden if shared_ffn else 0,
    )

    def one(layer: int) -> Mlp:
        if layer in dense_layers or (layer + 1) % step:
            return mlp(hidden, keys.integer("intermediate_size"))
        return sparse

    return [one(layer) for layer in range(layers)]


def deepseek(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns experts and shared experts (DeepSeekMoE) by `mlp_layer_types`, or else after
    `first_k_dense_replace` dense layers."""
    hidden, ffn = keys.integer("hidden_size"), keys.integer("moe_intermediate_size")
    shared_ffn = ffn * keys.count("n_shared_experts", default=0)
    sparse = experts(
        hidden,
        keys.integer("n_routed_experts"),
        keys.integer("num_experts_per_tok"),
        mlp(hidden, ffn),
        shared=mlp(hidden, shared_ffn).parameters,
    )
    first = keys.count("first_k_dense_replace")
    usual = ["dense" if layer < first else "sparse" for layer in range(layers)]
    kinds = keys.kinds("mlp_layer_types", layers, {"dense", "sparse"}, usual)
    dense = mlp(hidden, keys.integer("intermediate_size"))
    return [dense if kind == "dense" else sparse for kind in kinds]


def ernie(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns experts in every `moe_layer_interval`-th layer of a range, with a correction of the
    router's scores."""
    hidden, bias = keys.integer("hidden_size"), keys.flag("use_bias")
    number, ffn = keys.integer("moe_num_experts"), keys.integer("moe_intermediate_size")
    shared_ffn = ffn * keys.count("moe_num_shared_experts", default=0)
    sparse = experts(
        hidden,
        number,
        keys.integer("moe_k"),
        mlp(hidden, ffn),
        shared=mlp(hidden, shared_ffn, bias=bias).parameters,
        router=linear(hidden, number) + number,
    )
    dense = mlp(hidden, keys.integer("intermediate_size"), bias=bias)
    first, step = keys.count("moe_layer_start_index"), keys.integer("moe_layer_interval")
    end = keys.get("moe_layer_end_index")
    last = end if isinstance(end, int) and end >= 0 else layers - 1

    def has_experts(layer: int) -> bool:
        return (layer + 1) % step == 0 and first <= layer <= last

    return [sparse if has_experts(layer) else dense for layer in range(layers)]


def llama4(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
    """Returns experts and a shared one in `moe_layers`, or else by `interleave_moe_layer_step`."""
    hidden = keys.integer("hidden_size")
    each = mlp(hidden, keys.integer("intermediate_size"))
    number, used = keys.integer("num_local_experts"), keys.integer("num_experts_per_tok")
    sparse = experts(hidden, number, used, each, shared=each.parameters)
    dense = mlp(hidden, keys.integer("intermediate_size_mlp"))
    step = keys.integer("interleave_moe_layer_step")
    listed = keys.integers("moe_layers")
    chosen = range(step - 1, layers, step) if listed is None else listed
    return [sparse if layer in chosen else dense for layer in range(layers)]
