"""vLLM's worker on a CPU with its KV cache in kvcached's pages."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import base_loader
from vllm.v1.worker.cpu_worker import CPUWorker

from kvcached.engines.device_share import weights_bytes
from kvcached.engines.packed import replaced
from kvcached.engines.vllm import latents, states
from kvcached.engines.vllm.worker import ElasticWorker


class ElasticCPUWorker(ElasticWorker, CPUWorker):  # type: ignore[misc]
    """Worker of KVCACHED_DEVICE=host:N."""

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model and leases the memory of its weights.

        They are measured before vLLM packs them for its kernels, since packed weights are no longer
        tensors of the model.
        """
        states.install()
        process, sizes = base_loader.process_weights_after_loading, [0]

        def measure_and_process(model: torch.nn.Module, *args: Any) -> None:
            sizes.append(weights_bytes(model))
            process(model, *args)

        with replaced(base_loader, "process_weights_after_loading", measure_and_process):
            super().load_model(**kwargs)
        self._memory.share.lease_static(max(*sizes, weights_bytes(self.model_runner.get_model())))

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns the layout with blocks first.

        Kernels that support heads as a block's outermost dimension accept blocks at any stride.
        """
        if self.model_config.use_mla:
            latents.install()
        names = super().get_supported_kv_cache_layouts()
        if "LBHNC" not in names:
            raise NotImplementedError(
                f"kvcached supports vLLM's KV layout LBHNC, but this model's attention has {names}"
            )
        return ["BLHNC"]

    def warm_up(self) -> None:
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
