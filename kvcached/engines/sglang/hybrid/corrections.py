"""Corrections of SGLang's models, on all devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models import hunyuan
from sglang.srt.models.llama4 import Llama4ForCausalLM
from sglang.srt.models.mllama4 import Llama4ForConditionalGeneration
from torch import nn

# Names of transformers 5 for kinds of layers, with SGLang's.
_RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}
_kinds_of_layers = NemotronHConfig._resolve_layers_block_type


def install() -> None:
    """Replaces parts of SGLang's models. Idempotent."""
    NemotronHConfig._resolve_layers_block_type = staticmethod(kinds_of_layers)
    hunyuan.RadixAttention = FlatAttention
    Llama4ForCausalLM.load_weights = load_llama4


def kinds_of_layers(*args: Any) -> list[str]:
    """Returns SGLang's names of the layers in a config.json of Nemotron-H, which transformers 5
    saves by its own names."""
    return [_RENAMED.get(kind, kind) for kind in _kinds_of_layers(*args)]


class FlatAttention(RadixAttention):  # type: ignore[misc]
    """Attention of Hunyuan, which passes one row for each head after it has normed them, but
    SGLang counts tokens by rows."""

    def forward(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        q = q.reshape(-1, self.tp_q_head_num * self.qk_head_dim)
        k = k.reshape(-1, self.tp_k_head_num * self.qk_head_dim)
        return super().forward(q, k, v, *args, **kwargs)


def load_llama4(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads Llama 4's language model as a part of the whole model, for which alone SGLang loads
    experts and reorders Q and K."""
    whole = Llama4ForConditionalGeneration.__new__(Llama4ForConditionalGeneration)
    nn.Module.__init__(whole)
    whole.config, whole.has_vision, whole.language_model = model.config, False, model
    whole.load_weights(weights)
