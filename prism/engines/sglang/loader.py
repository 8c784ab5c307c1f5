"""Weight loader of SGLang for parameters in kvcached pages (`prism.engines.parameters`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_loader import loader as stock
from sglang.srt.models.transformers import TransformersBase
from torch import nn

from kvcached import Checkpoint
from kvcached.engines.sglang.hybrid import corrections
from kvcached.engines.sglang.memory import active_memory
from prism.engines import parameters
from prism.engines.sglang import bitsandbytes_loading, gguf_loading
from prism.engines.sglang.memory import EngineMemory
from prism.engines.sglang.platform import gpu
from prism.engines.weights.model_weights import ModelWeights
from prism.models.files import BITSANDBYTES
from prism.models.gguf.gguf_weights import GGUF
from prism.models.text_part import PART, text_weight

# Parameters on the meta device get their memory, in pages, after the model is built. SGLang would
# make others for transformers' modules, without the loaders that divide them over ranks.
TransformersBase._init_parameters = lambda _self, _module: None

# Methods that leave parameters where they are. Those in GGUF are joined before they are laid out.
_IN_PLACE = (
    *gguf_loading.METHODS,
    bitsandbytes_loading.METHOD,
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)


class KvcachedLoader(stock.DefaultModelLoader):  # type: ignore[misc]
    """Loader class, which SGLang accepts as a load format and calls `load_model` of."""

    def __init__(self, load_config: Any) -> None:
        files = {"load_format": LoadFormat.SAFETENSORS}
        super().__init__(dataclasses.replace(load_config, **files))

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        memory = active_memory()
        assert isinstance(memory, EngineMemory)
        device = torch.device(device_config.device)
        path = Path(model_config.model_path)
        in_gguf = model_config.quantization == GGUF
        if in_gguf:
            tensors_in_gguf = Checkpoint.open(path).tensors
            corrections.interleave_rotary(model_config)
        states: dict[str, nn.Parameter] = {}
        quantization = stock._get_quantization_config(model_config, self.load_config)

        def build() -> nn.Module:
            with device:
                model = stock._initialize_model(model_config, self.load_config, quantization)
            if in_gguf:
                gguf_loading.make_parameters(model, tensors_in_gguf, model_config.dtype)
            if model_config.quantization == BITSANDBYTES:
                states.update(bitsandbytes_loading.make_states(model, path))
            if not in_gguf and model_config.hf_text_config.tie_word_embeddings:
                _tie(model)
            return model

        def read(model: nn.Module) -> None:
            if in_gguf:
                ahead = memory.weights.prefetched()
                gguf_loading.read(model, tensors_in_gguf, model_config.dtype, ahead)
            else:
                tensors = self._tensors(model_config, model, memory.weights)
                tensors = bitsandbytes_loading.other_tensors(tensors, states)
                self.load_weights_only(model, tensors, device)
            if device.type == gpu.CUDA:
                torch.cuda.synchronize()

        def finish(module: nn.Module) -> None:
            with stock.device_loading_context(module, device):
                module.quant_method.process_weights_after_loading(module)
            if isinstance(module.quant_method, bitsandbytes_loading.METHOD):
                bitsandbytes_loading.attach_states(module)

        with stock.set_default_torch_dtype(model_config.dtype):
            steps = parameters.EngineLoader(build, read, _modules, finish, _repacks)
            return parameters.load(memory, steps)

    def _tensors(
        self, model_config: Any, model: nn.Module, weights: ModelWeights
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the prefetched tensors if SGLang would only read the same files, otherwise the
        tensors that SGLang reads."""
        special = ("secondary_weights", "allow_patterns_overrides")
        is_plain = not any(getattr(model, name, None) for name in special)
        ahead = weights.prefetched() if is_plain else None
        tensors = self._get_all_weights(model_config, model) if ahead is None else ahead
        if not getattr(model_config.hf_config, PART, False):
            yield from tensors
            return
        for name, tensor in tensors:
            if (own := text_weight(name)) is not None:
                yield own, tensor


def _tie(model: nn.Module) -> None:
    """Makes the output matrix the embedding's own, for classes of SGLang that would load the same
    values twice (LFM2)."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not isinstance(head, nn.Module) or not isinstance(embedding, nn.Module):
        return
    if embedding.weight.shape == head.weight.shape:
        head.weight = embedding.weight


def _modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose weights SGLang processes after loading, in its order."""
    return [module for module, _ in stock._modules_with_quant_method(model)]


def _repacks(module: nn.Module) -> bool:
    return not isinstance(module.quant_method, _IN_PLACE)
