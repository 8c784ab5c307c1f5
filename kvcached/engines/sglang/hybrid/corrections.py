"""Corrections of SGLang's models, on all devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor import model_runner
from sglang.srt.model_loader.loader import GGUFModelLoader
from sglang.srt.models import gemma3n_causal, gpt2, hunyuan, olmoe
from sglang.srt.models.gemma3n_causal import Gemma3nForCausalLM
from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM
from sglang.srt.models.gpt2 import GPT2LMHeadModel
from sglang.srt.models.llama4 import Llama4ForCausalLM
from sglang.srt.models.mllama4 import Llama4ForConditionalGeneration
from sglang.srt.models.phi import PhiModel
from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from sglang.srt.models.starcoder2 import Starcoder2Model
from sglang.srt.runtime_context import get_parallel
from torch import nn

from kvcached.engines.sglang.hybrid import configs
from kvcached.errors import InvalidArgumentError
from kvcached.models import shape_of_config

Weights = Iterable[tuple[str, torch.Tensor]]

_load_gguf = GGUFModelLoader.load_model
_load_gemma3n = Gemma3nForCausalLM.load_weights
_load_gemma4 = Gemma4ForCausalLM.load_weights
_load_gpt2 = GPT2LMHeadModel.load_weights
_load_qwen3_vl_moe = Qwen3VLMoeForConditionalGeneration.load_weights
_padded_sizes = model_runner.adjust_config_with_unaligned_cpu_tp
_window_of = model_runner.resolve_sliding_window_size


# The first layer of Phi and StarCoder2, and the end: all ranks have all layers. SGLang takes a rank
# for a stage of a pipeline.
_FIRST_LAYER = property(lambda _: 0, lambda *_: None)
_END_LAYER = property(lambda model: len(model.layers), lambda *_: None)


def install() -> None:
    """Replaces parts of SGLang's models, before one is built. Idempotent."""
    configs.install()
    gemma3n_causal.RadixAttention = WindowAttention
    gpt2.RadixAttention = MultiHeadAttention
    hunyuan.RadixAttention = FlatAttention
    olmoe.RMSNorm = RankNorm
    for model in (PhiModel, Starcoder2Model):
        model.start_layer, model.end_layer = _FIRST_LAYER, _END_LAYER
    model_runner.adjust_config_with_unaligned_cpu_tp = padded_sizes
    model_runner.resolve_sliding_window_size = window_of
    GGUFModelLoader.load_model = load_gguf
    Gemma3nForCausalLM.load_weights = load_gemma3n
    Gemma4ForCausalLM.load_weights = load_gemma4
    GPT2LMHeadModel.load_weights = load_gpt2
    Llama4ForCausalLM.load_weights = load_llama4
    Qwen3VLMoeForConditionalGeneration.load_weights = load_qwen3_vl_moe


def require() -> None:
    """Raises RuntimeError if a model was loaded without them: its answers would be wrong."""
    if Llama4ForCausalLM.load_weights is not load_llama4:
        raise RuntimeError("SGLang has not run kvcached's plugin: see its log")


def padded_sizes(model_config: Any, *args: Any) -> Any:
    """Returns the config with sizes that SGLang pads on a CPU, except for models with a list of
    sizes, for which it fails (Gemma 3n)."""
    listed = isinstance(getattr(model_config.hf_config, "intermediate_size", None), list)
    return model_config if listed else _padded_sizes(model_config, *args)


def window_of(model: Any, model_config: Any) -> int | None:
    """Returns the tokens before a token that windows of a loaded model have, None without windows.
    Gives windows to layers of SGLang's classes that ignore them (Mistral, Phi-3, Qwen), and of
    transformers' (Ministral), whose it makes a token too long. Models that `kvcached.models` does
    not know stay as they are."""
    found: int | None = _window_of(model, model_config)
    config = model_config.hf_text_config
    if found is not None or not getattr(config, "sliding_window", None):
        return found
    try:
        layers = shape_of_config(config.to_dict()).layers
    except InvalidArgumentError:
        return None
    of_transformers = getattr(model, "attention_instances", {}).values()
    for each in (*model.modules(), *of_transformers):
        if isinstance(each, RadixAttention):
            each.sliding_window_size = (layers[each.layer_id].window_tokens or 0) - 1
    return max((each.window_tokens - 1 for each in layers if each.window_tokens), default=None)


class FlatAttention(RadixAttention):  # type: ignore[misc]
    """Attention of Gemma 3n and Hunyuan, which pass heads in another dimension or in rows, for
    SGLang's attention in plain torch. That returns as many rows as it is given."""

    def forward(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        q = q.reshape(-1, self.tp_q_head_num * self.qk_head_dim)
        if k is not None:
            k = k.reshape(-1, self.tp_k_head_num * self.qk_head_dim)
        return super().forward(q, k, v, *args, **kwargs)


class MultiHeadAttention(RadixAttention):  # type: ignore[misc]
    """Attention of GPT-2, for which SGLang gives each rank the K and V heads of all."""

    def __init__(self, num_heads: int, *args: Any, num_kv_heads: int, **kwargs: Any) -> None:
        super().__init__(num_heads, *args, num_kv_heads=num_heads, **kwargs)


class RankNorm(RMSNorm):  # type: ignore[misc]
    """Norm of OLMoE. That of Q and K is over the heads of all ranks, of which SGLang passes one's
    own."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[-1] == self.hidden_size:
            return super().forward(x, *args, **kwargs)
        normed = super().forward(tensor_model_parallel_all_gather(x.contiguous()))
        return normed.chunk(get_parallel().tp_size, dim=-1)[get_parallel().tp_rank]


class WindowAttention(FlatAttention):
    """Attention of Gemma 3n. SGLang counts a token itself to the tokens before it in a window."""

    def __init__(self, *args: Any, sliding_window_size: int | None = None, **kwargs: Any) -> None:
        before = None if sliding_window_size is None else sliding_window_size - 1
        super().__init__(*args, sliding_window_size=before, **kwargs)


def load_gguf(loader: Any, *, model_config: Any, device_config: Any) -> nn.Module:
    """Loads a model in GGUF."""
    interleave_rotary(model_config)
    return _load_gguf(loader, model_config=model_config, device_config=device_config)


def interleave_rotary(model_config: Any) -> None:
    """Changes the config of a model in GGUF, which has the rows of Llama's Q and K in the order of
    interleaved rotary embeddings."""
    if model_config.hf_config.model_type == "llama":
        model_config.hf_config.rope_is_neox_style = False


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
            name, rows = f"layers.{number}.self_attn", own.total_num_kv_heads * own.head_dim
            shape = (rows, model.config.hidden_size)  # of all ranks
            unused |= {f"model.{name}.{each}_proj.weight": shape for each in "kv"}
            unused[f"model.{name}.k_norm.weight"] = (own.head_dim,)
    for name, tensor in weights:
        unused.pop(name, None)
        yield name, tensor
    yield from ((name, torch.zeros(shape)) for name, shape in unused.items())


def load_gpt2(model: Any, weights: Weights) -> None:
    """Loads GPT-2, whose matrices SGLang transposes but can divide only as they are in memory."""
    _load_gpt2(model, ((name, _columns_first(tensor)) for name, tensor in weights))


def _columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with the columns of a matrix adjacent in memory."""
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def load_llama4(model: Any, weights: Weights) -> None:
    """Loads Llama 4's language model as a part of the whole model, for which alone SGLang loads
    experts and reorders Q and K."""
    whole = Llama4ForConditionalGeneration.__new__(Llama4ForConditionalGeneration)
    nn.Module.__init__(whole)
    whole.config, whole.has_vision, whole.language_model = model.config, False, model
    whole.load_weights(weights)


def load_qwen3_vl_moe(model: Any, weights: Weights) -> Any:
    """Loads Qwen3-VL-MoE, also from files of transformers 5, which saves the experts' matrices
    transposed."""
    return _load_qwen3_vl_moe(model, _as_published(weights, model.config.hidden_size))


def _as_published(weights: Weights, hidden: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        inputs = {"gate_up_proj": -2, "down_proj": -1}.get(name.rpartition(".experts.")[2])
        is_saved = inputs and tensor.shape[inputs] != hidden == tensor.shape[-3 - inputs]
        yield name, tensor.transpose(-1, -2) if is_saved else tensor
