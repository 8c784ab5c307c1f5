"""Shapes of public models, by their config.json, and the sizes of weights and KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from prism.errors import ConfigError

if TYPE_CHECKING:
    from kvcached.layouts.attention import Heads, Latent
    from kvcached.layouts.base import TokenPart
    from kvcached.layouts.hybrid import LayerGroup
    from kvcached.models import LayerShape
    from kvcached.models import ModelShape as Decoder


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model, and the types of its weights and KV."""

    name: str
    decoder: Decoder
    # 1 for 8-bit checkpoints.
    weight_dtype_bytes: int = 2
    # Of activations and states.
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    # True if layers with sliding windows keep only these, in a separate pool.
    windows_apart: bool = False

    @property
    def geometry(self) -> ModelShape:
        """Shape without names and the context's length, none of which changes costs."""
        decoder = replace(self.decoder, model_type="", context_tokens=0, dtype="")
        return replace(self, name="", decoder=decoder)

    @property
    def layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def main_layers(self) -> tuple[LayerShape, ...]:
        """Layers that keep KV of all tokens."""
        kept = (layer for layer in self.decoder.layers if layer.kv)
        return tuple(layer for layer in kept if not (self.windows_apart and layer.window_tokens))

    @property
    def is_uniform(self) -> bool:
        """True if all layers that keep anything keep the same KV of all tokens."""
        kept = [layer for layer in self.decoder.layers if layer.kv or layer.state]
        return {(layer.kv, layer.state) for layer in kept} == {(kept[0].kv, None)} and (
            len(self.main_layers) == len(kept)
        )

    @property
    def _kv_parts(self) -> list[tuple[TokenPart, ...]]:
        """Numbers of a token in each layer that keeps KV of all tokens: K and V, or a latent."""
        return [layer.kv.parts(0) for layer in self.main_layers if layer.kv]

    @property
    def heads(self) -> int:
        """Number of query heads of a layer with attention."""
        return next(layer.heads for layer in self.decoder.layers if layer.heads)

    @property
    def kv_heads(self) -> int:
        """Number of K and V heads of a layer: one with latent attention."""
        return self._kv_parts[0][0].heads

    @property
    def kv_layers(self) -> int:
        """Number of layers that keep KV of all tokens."""
        return len(self._kv_parts)

    @property
    def buffers(self) -> int:
        """Number of K and V buffers of these layers. Latent attention has one a layer."""
        return sum(len(parts) for parts in self._kv_parts)

    @property
    def kv_dim(self) -> int:
        """Numbers of K, or of V, of one head. Half a latent."""
        return self.kv_token_bytes() // (2 * self.kv_dtype_bytes * self.kv_layers * self.kv_heads)

    @property
    def parameters(self) -> int:
        return self.decoder.parameters

    def weight_bytes(self, tp: int = 1) -> int:
        """Returns the weights on one of `tp` GPUs, rounded up."""
        return -(-self.parameters * self.weight_dtype_bytes // tp)

    def kv_token_bytes(self, tp: int = 1) -> int:
        """Returns the KV of one token of the main pool on one of `tp` GPUs. With more GPUs than KV
        heads the heads are replicated; a latent always is."""
        return sum(self._part_bytes(parts, tp) for parts in self._kv_parts)

    def read_token_bytes(self, tp: int = 1) -> dict[int | None, int]:
        """Returns the KV that attention reads of one token on one of `tp` GPUs, by the window of
        the layers that read it. Layers without K and V read those of the layer before them that has
        the same window."""
        found = dict.fromkeys((None, *(layer.window_tokens for layer in self.decoder.layers)), 0)
        latest: dict[int | None, Heads | Latent] = {}
        for layer in self.decoder.layers:
            kv = layer.kv or (latest.get(layer.window_tokens) if layer.heads else None)
            if kv is not None:
                latest[layer.window_tokens] = kv
                found[layer.window_tokens] += self._part_bytes(kv.parts(0), tp)
        return found

    def kv_groups(self, block_tokens: int) -> tuple[LayerGroup, ...]:
        """Returns the layers that keep KV by their pool, the main one first."""
        from kvcached.layouts.hybrid import HybridLayout, LayerGroup
        from kvcached.models.reading import layout_of_shape

        layers = tuple(
            replace(layer, window_tokens=layer.window_tokens if self.windows_apart else None)
            for layer in self.decoder.layers
        )
        dtypes = {4: "float32", 2: "bfloat16", 1: "float8_e4m3fn"}
        decoder = replace(self.decoder, layers=layers)
        found = layout_of_shape(decoder, dtypes[self.kv_dtype_bytes], block_tokens)
        if isinstance(found, HybridLayout):
            return found.groups
        return (LayerGroup("full", tuple(range(found.layer_count)), found),)

    def state_bytes(self) -> int:
        """Returns the states of one sequence."""
        return self.decoder.state_bytes(self.dtype_bytes)

    def kept_by_rank(self, tp: int) -> ModelShape:
        """Returns the shape with the KV and states on each of `tp` GPUs. Raises ConfigError if they
        cannot share them."""
        from kvcached.errors import InvalidArgumentError

        try:
            return replace(self, decoder=self.decoder.kept_by_rank(tp))
        except InvalidArgumentError as error:
            raise ConfigError(f"tp {tp}: {self.name}: {error}") from error

    def _part_bytes(self, parts: tuple[TokenPart, ...], tp: int) -> int:
        return sum(-(-part.heads // tp) * part.dim for part in parts) * self.kv_dtype_bytes


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def _config(*sizes: int) -> dict[str, Any]:
    """Returns the config.json of a Llama of these `_SIZES`."""
    named = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": "llama", **named, "tie_word_embeddings": False} | _positions(131072)


def _positions(tokens: int) -> dict[str, Any]:
    return {"max_position_embeddings": tokens}


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    sizes = _config(layers, hidden, heads, heads, hidden // heads, ffn, 32000)
    return sizes | _positions(2048)


FP8 = "-fp8"
_QWEN2 = {"model_type": "qwen2"}
_QWEN3 = {"model_type": "qwen3"} | _positions(40960)
_LLAMA_2 = _positions(4096)
_TIED = {"tie_word_embeddings": True}
_OPT_6_7B = {
    "model_type": "opt",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_dim": 16384,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}
_LLAMA_70B = _config(80, 8192, 64, 8, 128, 28672, 128256)

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B": _config(16, 2048, 32, 8, 64, 8192, 128256) | _TIED,
    "meta-llama/Llama-3.2-3B": _config(28, 3072, 24, 8, 128, 8192, 128256) | _TIED,
    "meta-llama/Llama-3.1-8B": _config(32, 4096, 32, 8, 128, 14336, 128256),
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "meta-llama/Llama-2-70B": _LLAMA_70B | {"vocab_size": 32000} | _LLAMA_2,
    "meta-llama/Llama-2-7B": _llama(32, 4096, 32, 11008) | _LLAMA_2,
    "meta-llama/Llama-2-13B": _llama(40, 5120, 40, 13824) | _LLAMA_2,
    "huggyllama/llama-7b": _llama(32, 4096, 32, 11008),
    "huggyllama/llama-13b": _llama(40, 5120, 40, 13824),
    "huggyllama/llama-30b": _llama(60, 6656, 52, 17920),
    "huggyllama/llama-65b": _llama(80, 8192, 64, 22016),
    "facebook/opt-6.7b": _OPT_6_7B,
    "Qwen/Qwen3-0.6B": _config(28, 1024, 16, 8, 128, 3072, 151936) | _QWEN3 | _TIED,
    "Qwen/Qwen3-1.7B": _config(28, 2048, 16, 8, 128, 6144, 151936) | _QWEN3 | _TIED,
    "Qwen/Qwen3-4B": _config(36, 2560, 32, 8, 128, 9728, 151936) | _QWEN3 | _TIED,
    "Qwen/Qwen3-8B": _config(36, 4096, 32, 8, 128, 12288, 151936) | _QWEN3,
    "Qwen/Qwen3-14B": _config(40, 5120, 40, 8, 128, 17408, 151936) | _QWEN3,
    "Qwen/Qwen3-32B": _config(64, 5120, 64, 8, 128, 25600, 151936) | _QWEN3,
    "Qwen/Qwen2.5-1.5B": _config(28, 1536, 12, 2, 128, 8960, 151936) | _QWEN2 | _TIED,
    "Qwen/Qwen2.5-7B": _config(28, 3584, 28, 4, 128, 18944, 152064) | _QWEN2,
    "Qwen/Qwen2.5-14B": _config(48, 5120, 40, 8, 128, 13824, 152064) | _QWEN2,
    "Qwen/Qwen2.5-32B": _config(64, 5120, 40, 8, 128, 27648, 152064) | _QWEN2,
    "mistralai/Mistral-7B-v0.1": _config(32, 4096, 32, 8, 128, 14336, 32000)
    | {"model_type": "mistral"}
    | _positions(32768),
}


@cache
def shape_named(name: str) -> ModelShape:
    """Returns the shape of the model called `name` in CONFIGS."""
    from kvcached.models import shape_of_config

    return ModelShape(name, shape_of_config(CONFIGS[name]))


def known_shape(name: str) -> ModelShape | None:
    """Returns the shape of a public model, or None.

    The name is the full one or the part after the slash, case-insensitive, with or without
    "-Instruct". A suffix "-FP8" means 8-bit weights.
    """
    short = short_name(name)
    stem = short.removesuffix(FP8)
    found = next((known for known in CONFIGS if short_name(known) == stem), None)
    if found is None:
        return None
    return in_fp8(shape_named(found)) if short.endswith(FP8) else shape_named(found)


def in_fp8(shape: ModelShape) -> ModelShape:
    """Returns the same model with 8-bit weights."""
    return replace(shape, name=shape.name + FP8.upper(), weight_dtype_bytes=1)


def short_name(name: str) -> str:
    """Returns the normalised name that `known_shape` compares."""
    short = name.rpartition("/")[2].lower()
    stem = short.removesuffix(FP8)
    return stem.removesuffix("-instruct").removesuffix("-hf") + short[len(stem) :]
