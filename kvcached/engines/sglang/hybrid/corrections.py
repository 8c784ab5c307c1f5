"""Corrections of SGLang's models, on all devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs import model_config
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models import gemma3n_causal, hunyuan
from sglang.srt.models.gemma3n_causal import Gemma3nForCausalLM
from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM
from sglang.srt.models.llama4 import Llama4ForCausalLM
from sglang.srt.models.mllama4 import Llama4ForConditionalGeneration
from sglang.srt.utils.hf_transformers import config as parsing
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]

# Names of transformers 5 for kinds of layers, with SGLang's.
_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
_hybrid_layer_ids = model_config.get_hybrid_layer_ids
_load_gemma3n = Gemma3nForCausalLM.load_weights
_load_gemma4 = Gemma4ForCausalLM.load_weights
_text_config_of = parsing.get_hf_text_config
_kinds_of_layers = NemotronHConfig._resolve_layers_block_type


def install() -> None:
    """Replaces parts of SGLang's models. Idempotent."""
    NemotronHConfig._resolve_layers_block_type = staticmethod(kinds_of_layers)
    gemma3n_causal.RadixAttention = WindowAttention
    hunyuan.RadixAttention = FlatAttention
    model_config.get_hybrid_layer_ids = layers_with_kv
    parsing.get_hf_text_config = text_config_of
    Gemma3nForCausalLM.load_weights = load_gemma3n
    Gemma4ForCausalLM.load_weights = load_gemma4
    Llama4ForCausalLM.load_weights = load_llama4


def kinds_of_layers(*args: Any) -> list[str]:
    """Returns SGLang's names of the layers in a config.json of Nemotron-H, which transformers 5
    saves by its own names."""
    return [_RENAMED.get(kind, kind) for kind in _kinds_of_layers(*args)]


def text_config_of(config: Any) -> Any:
    """Returns a model's text config. SGLang gives Gemma 4 the heads of its layers by the names that
    it reads only as a part of a whole model, and fails for the language model alone."""
    if config.model_type == "gemma4_text" and not hasattr(config, "swa_head_dim"):
        parsing._apply_gemma4_attention_overrides(SimpleNamespace(text_config=config))
    return _text_config_of(config=config)


def layers_with_kv(architectures: Any, config: Any) -> tuple[Any, Any]:
    """Returns the layers with windows and with full attention, without those that read the K and V
    of others (Gemma 3n and 4)."""
    first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    windows, full = (
        None if layers is None else [layer for layer in layers if layer < first_shared]
        for layers in _hybrid_layer_ids(architectures, config)
    )
    return windows, full


class FlatAttention(RadixAttention):  # type: ignore[misc]
    """Attention of Gemma 3n and Hunyuan, which pass heads in another dimension or in rows, for
    SGLang's attention in plain torch. That returns as many rows as it is given."""

    def forward(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        q = q.reshape(-1, self.tp_q_head_num * self.qk_head_dim)
        if k is not None:
            k = k.reshape(-1, self.tp_k_head_num * self.qk_head_dim)
        return super().forward(q, k, v, *args, **kwargs)


class WindowAttention(FlatAttention):
    """Attention of Gemma 3n. SGLang counts a token itself to the tokens before it in a window."""

    def __init__(self, *args: Any, sliding_window_size: int | None = None, **kwargs: Any) -> None:
        before = None if sliding_window_size is None else sliding_window_size - 1
        super().__init__(*args, sliding_window_size=before, **kwargs)


def load_gemma3n(model: Any, weights: Weights) -> Any:
    """Loads Gemma 3n."""
    return _load_gemma3n(model, _with_unused_kv(model, weights))


def load_gemma4(model: Any, weights: Weights) -> Any:
    """Loads Gemma 4."""
    return _load_gemma4(model, _with_unused_kv(model, weights))


def _with_unused_kv(model: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights, and zeros for those of K and V that SGLang has but does not use in layers
    that read others'. Files of transformers 5 leave them out."""
    unused = dict[str, tuple[int, ...]]()
    for number, layer in enumerate(model.model.layers):
        own = layer.self_attn
        if own.is_kv_shared_layer:
            shape, name = (own.kv_size, model.config.hidden_size), f"layers.{number}.self_attn"
            unused |= {f"model.{name}.{each}_proj.weight": shape for each in "kv"}
            unused[f"model.{name}.k_norm.weight"] = (own.head_dim,)
    for name, tensor in weights:
        unused.pop(name, None)
        yield name, tensor
    yield from ((name, torch.zeros(shape)) for name, shape in unused.items())


def load_llama4(model: Any, weights: Weights) -> None:
    """Loads Llama 4's language model as a part of the whole model, for which alone SGLang loads
    experts and reorders Q and K."""
    whole = Llama4ForConditionalGeneration.__new__(Llama4ForConditionalGeneration)
    nn.Module.__init__(whole)
    whole.config, whole.has_vision, whole.language_model = model.config, False, model
    whole.load_weights(weights)
