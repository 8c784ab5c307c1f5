"""Weight loader of vLLM for parameters in kvcached pages (`prism.engines.parameters`)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from kvcached.engines.packed import replaced
from kvcached.engines.vllm.memory import active_memory
from prism.engines import parameters
from prism.engines.vllm.memory import EngineMemory

LOAD_FORMAT = "prism_pages"


@register_model_loader(LOAD_FORMAT)
class KvcachedLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loader that leaves weights as they are loaded, except those of experts, whose kernel reads
    packed ones only. vLLM would pack a second copy of every weight, outside of the ledger's pages.
    """

    def __init__(self, load_config: Any) -> None:
        load_config.load_format = "safetensors"
        super().__init__(load_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        memory = active_memory()
        assert isinstance(memory, EngineMemory)
        self._memory, device = memory, torch.device("cpu")

        def build() -> nn.Module:
            # A model that fills tensors itself is built twice, but vLLM refuses a second layer of a
            # name.
            vllm_config.compilation_config.static_forward_context.clear()
            with device:
                model = initialize_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            _add_kernels(model)
            return model

        def read(model: nn.Module) -> None:
            self.load_weights(model, model_config)

        def finish(module: nn.Module) -> None:
            if _is_packed(module):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
                return
            with (
                replaced(layers, "dispatch_cpu_unquantized_gemm", _leave_weight),
                replaced(UnquantizedFusedMoEMethod, "process_weights_after_loading", _is_done),
            ):
                process_weights_after_loading(module, model_config, device)

        with set_default_torch_dtype(model_config.dtype):
            steps = parameters.EngineLoader(build, read, _modules, finish, _is_packed)
            return parameters.load(memory, steps)

    def get_all_weights(
        self, model_config: Any, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yields the prefetched tensors if vLLM would only read the same files, otherwise the
        tensors that vLLM reads."""
        special = ("secondary_weights", "allow_patterns_overrides", "is_unused_checkpoint_weight")
        is_plain = not any(getattr(model, name, None) for name in special)
        ahead = self._memory.weights.prefetched() if is_plain else None
        yield from super().get_all_weights(model_config, model) if ahead is None else ahead


def _add_kernels(model: nn.Module) -> None:
    """Creates the kernels that vLLM creates after loading, so that a model whose weights come from
    the store has them too."""
    for module in model.modules():
        if _is_packed(module):
            module.quant_method._init_moe_kernel(module)
        elif hasattr(module, "quant_method"):
            module.cpu_linear = nn.functional.linear


def _modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules to process after loading: experts, then all others at once."""
    return [*filter(_is_packed, model.modules()), model]


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, RoutedExperts)


def _leave_weight(layer: nn.Module, remove_weight: bool) -> None:
    """Replaces the packing of a linear layer."""


def _is_done(method: Any, layer: nn.Module) -> None:
    """Replaces the packing of experts, which `finish` has packed one by one."""
