"""Families whose layers are attention and an MLP, and differ in details."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcached.layouts.attention import Heads, Latent
from kvcached.models.config_keys import ConfigKeys
from kvcached.models.parts import (
    absorbed_numbers,
    attention,
    heads_of,
    latent_attention,
    linear,
    mlp,
    pair_flops,
)
from kvcached.models.shape import LayerShape, Mlp, ModelShape

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

Windows = Callable[[ConfigKeys, int], Sequence[int | None]]
Mlps = Callable[[ConfigKeys, int], Sequence[Mlp]]
# True, False, or the key that says it.
Flag = bool | str


def model_shape(
    keys: ConfigKeys,
    layers: Sequence[LayerShape],
    *,
    other: int,
    positions: int = 0,
    width: int | None = None,
    head_bias: bool = False,
) -> ModelShape:
    """Returns the shape of a model with these layers.

    Args:
        keys: The config.json.
        layers: Its layers.
        other: Parameters outside of layers, the embedding and the output matrix.
        positions: Parameters of learned positions.
        width: Numbers of an embedding (None: hidden_size).
        head_bias: Whether the output matrix has a bias.
    """
    hidden, vocab = keys.integer("hidden_size", "n_embd", "n_embed"), keys.integer("vocab_size")
    tied, table = keys.flag("tie_word_embeddings"), vocab * (width or hidden)
    bias = vocab if head_bias else 0
    return ModelShape(
        model_type=str(keys.get("model_type")),
        hidden_size=hidden,
        vocab_size=vocab,
        context_tokens=keys.integer("max_position_embeddings", "n_positions", "seq_length"),
        dtype=str(keys.get("dtype")),
        layers=tuple(layers),
        table_parameters=table + positions,
        head_parameters=table + (0 if tied else bias),
        other_parameters=other + (bias if tied else 0),
        tied=tied,
    )


# --- windows ---------------------------------------------------------------------------------


def no_windows(keys: ConfigKeys, layers: int) -> Sequence[int | None]:
    """Returns full attention in every layer, whatever `sliding_window` says."""
    return [None] * layers


def window_everywhere(keys: ConfigKeys, layers: int) -> Sequence[int | None]:
    """Returns `sliding_window`, if it is set, for every layer."""
    return [keys.count("sliding_window", default=0) or None] * layers


def window_by_switch(keys: ConfigKeys, layers: int) -> Sequence[int | None]:
    """Returns windows by `layer_types`, or from `max_window_layers` on, if `use_sliding_window`."""
    if not keys.flag("use_sliding_window"):
        return [None] * layers
    first = keys.count("max_window_layers", default=layers)
    return _windows(keys, layers, [SLIDING if i >= first else FULL for i in range(layers)])


def window_everywhere_by_switch(keys: ConfigKeys, layers: int) -> Sequence[int | None]:
    """Returns `sliding_window` for every layer, if `use_sliding_window`."""
    switched_on = keys.flag("use_sliding_window")
    return window_everywhere(keys, layers) if switched_on else no_windows(keys, layers)


def window_except_every(count: int | None) -> Windows:
    """Returns a reader of windows by `layer_types`, or else in all but each `count`-th layer.

    `sliding_window_pattern` can change the count: a number, or letters such as LLLG. None: the
    config.json must list the layers.
    """

    def windows(keys: ConfigKeys, layers: int) -> Sequence[int | None]:
        return _windows(keys, layers, all_but_each(keys, layers, count))

    return windows


def all_but_each(keys: ConfigKeys, layers: int, count: int | None) -> Sequence[str]:
    """Returns windows for all but each `count`-th layer, or the count of
    `sliding_window_pattern`."""
    pattern = keys.get("sliding_window_pattern")
    if keys.get("layer_types") is not None:
        every = 1
    elif isinstance(pattern, str):
        every = len(pattern)
    else:
        every = keys.count("sliding_window_pattern", default=count)
    return [SLIDING if every and (i + 1) % every else FULL for i in range(layers)]


def _windows(keys: ConfigKeys, layers: int, usual: Sequence[str]) -> Sequence[int | None]:
    kinds = keys.kinds("layer_types", layers, {FULL, SLIDING}, usual)
    sizes = {FULL: None, SLIDING: keys.count("sliding_window", default=0) or None}
    return [sizes[kind] for kind in kinds]


def chunks(keys: ConfigKeys, layers: int) -> Sequence[int | None]:
    """Returns Llama 4's chunks, in the layers that have rotary positions."""
    every = keys.integer("no_rope_layer_interval")
    rotary = keys.integers("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    kinds = [CHUNKED if each else FULL for each in rotary]
    sizes = {FULL: None, CHUNKED: keys.integer("attention_chunk_size")}
    return [sizes[kind] for kind in keys.kinds("layer_types", layers, {FULL, CHUNKED}, kinds)]


# --- decoders --------------------------------------------------------------------------------


def same_mlps(*, gated: bool = True, bias: str = "mlp_bias") -> Mlps:
    """Returns a reader of the same MLP in every layer, of three matrices (gated) or two. It has
    biases if the key `bias` says so."""

    def mlps(keys: ConfigKeys, layers: int) -> Sequence[Mlp]:
        hidden, ffn = keys.integer("hidden_size"), keys.integer("intermediate_size")
        return [mlp(hidden, ffn, gated=gated, bias=keys.flag(bias))] * layers

    return mlps


GATED = same_mlps()


@dataclass(frozen=True, slots=True)
class Decoder:
    """Differences between families of decoders."""

    qkv_bias: Flag = "attention_bias"
    out_bias: Flag = "attention_bias"
    qk_norm: Literal["", "head", "all"] = ""
    qk_norm_key: str = ""
    """Key that switches `qk_norm` on, if there is one."""
    norms: int = 2
    """Norms of a layer."""
    parallel_key: str = ""
    """Key with which attention and MLP have one norm together, if there is one."""
    norm_bias: bool = False
    norm_scale: bool = True
    head_bias: Flag = False
    sinks: bool = False
    """Whether each query head has a sink."""
    latent: bool = False
    indexed: bool = False
    """Whether an indexer selects the tokens to attend to (DeepSeek-V3.2)."""
    windows: Windows = no_windows
    mlps: Mlps = GATED

    def shape(self, keys: ConfigKeys) -> ModelShape:
        """Returns the shape of the model."""
        hidden, layers = keys.integer("hidden_size"), keys.layers("num_hidden_layers")
        norm = hidden * (self.norm_scale + self.norm_bias)
        heads, kv, weights, flops = self._attention(keys)
        index, index_bytes = self._index(keys)
        parallel = self.parallel_key and keys.flag(self.parallel_key)
        mixer = weights + index + (1 if parallel else self.norms) * norm
        absorbed = absorbed_numbers(keys) if self.latent else 0
        parts = zip(self.windows(keys, layers), self.mlps(keys, layers), strict=True)
        made = [
            LayerShape(
                mixer, one, heads, flops, kv, window, index_bytes=index_bytes, absorbed=absorbed
            )
            for window, one in parts
        ]
        return model_shape(keys, made, other=norm, head_bias=self._flag(keys, self.head_bias))

    def _attention(self, keys: ConfigKeys) -> tuple[int, Heads | Latent, int, int]:
        """Returns query heads, what a token keeps, the parameters, and the operations for a pair of
        tokens."""
        if self.latent:
            weights, latent, flops = latent_attention(keys)
            return keys.integer("num_attention_heads"), latent, weights, flops
        hidden = keys.integer("hidden_size")
        heads, kv = heads_of(keys)
        normed = not self.qk_norm_key or keys.flag(self.qk_norm_key)
        weights = attention(
            hidden,
            heads,
            kv,
            qkv_bias=self._flag(keys, self.qkv_bias),
            out_bias=self._flag(keys, self.out_bias),
            qk_norm=self.qk_norm if normed else "",
        )
        return heads, kv, weights + (heads if self.sinks else 0), pair_flops(heads, kv)

    def _index(self, keys: ConfigKeys) -> tuple[int, int]:
        """Returns the parameters of a layer's indexer, and the bytes of its keys per token: FP8,
        with a float32 scale for each 128 numbers."""
        if not self.indexed:
            return 0, 0
        hidden, q_rank = keys.integer("hidden_size"), keys.integer("q_lora_rank")
        keys.integer("index_topk")  # of the tokens that it selects, which changes no size
        heads, dim = keys.integer("index_n_heads"), keys.integer("index_head_dim")
        weights = linear(q_rank, heads * dim) + linear(hidden, dim + heads) + 2 * dim
        return weights, dim + dim // 128 * 4

    @staticmethod
    def _flag(keys: ConfigKeys, flag: Flag) -> bool:
        return keys.flag(flag) if isinstance(flag, str) else flag
