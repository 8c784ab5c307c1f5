"""vLLM's worker on a GPU with its KV cache in kvcached's pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.utils.torch_utils import current_stream
from vllm.v1.worker import gpu_worker

from kvcached.engines import gpu_share
from kvcached.engines.packed import replaced
from kvcached.engines.vllm.worker import ElasticWorker, renumber

_FLAG = "--gpu-memory-utilization"


class ElasticGPUWorker(ElasticWorker, gpu_worker.Worker):  # type: ignore[misc]
    """Worker of KVCACHED_DEVICE=cuda:N."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._need_bytes = 0
        self._is_warm = False
        # vLLM then does not size the KV cache by the GPU's free memory, which others may take.
        if self.cache_config.kv_cache_memory_bytes is None:
            self.cache_config.kv_cache_memory_bytes = self._memory.share.device.capacity_bytes

    def init_device(self) -> None:
        """Leases the memory other than KV before vLLM takes any. Raises the errors of
        `gpu_share.lease`."""
        share = self._memory.share
        index = int(share.device.name.partition(":")[2])
        self._need_bytes = share.settings.static_bytes or self._measured_bytes(index)
        gpu_share.lease(share, index, self._need_bytes)
        # vLLM would require its share of the whole GPU to be free.
        with replaced(gpu_worker, "request_memory", lambda *_: self._need_bytes), self._leased():
            super().init_device()
        streams = (torch.cuda.default_stream(index), current_stream())
        share.client.set_streams([stream.cuda_stream for stream in streams])

    def _measured_bytes(self, index: int) -> int:
        folder, load = self.model_config.model, self.load_config
        if not Path(folder).is_dir():
            folder = download_weights_from_hf(
                folder, load.download_dir, list(gpu_share.WEIGHTS), self.model_config.revision
            )
        return gpu_share.need_bytes(folder, index, self.cache_config.gpu_memory_utilization)

    def _leased(self) -> Any:
        return gpu_share.within(self._need_bytes, _FLAG)

    def load_model(self, **kwargs: Any) -> None:
        with self._leased():
            super().load_model(**kwargs)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns the attention's preferred layout with blocks first, then layers."""
        names = super().get_supported_kv_cache_layouts()
        found = [name for name in names if name.startswith("BL")]
        if not found:
            raise NotImplementedError(
                f"kvcached supports vLLM's KV layouts BLNHC and BLHNC, but this model's attention "
                f"has {names}: choose another --attention-backend"
            )
        return found[:1]

    def warm_up(self) -> None:
        with self._leased():
            gpu_worker.Worker.determine_available_memory(self)

    def compile_or_warm_up_model(self) -> Any:
        """Warms up kernels, and captures graphs."""
        with self._leased():
            times = super().compile_or_warm_up_model()
        self._is_warm = True
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs a step. Steps of vLLM's own warm-up name blocks that the scheduler has not
        taken, and that do not have memory: the block of padding replaces them."""
        if not self._is_warm:
            renumber(scheduler_output, lambda groups: tuple([0] * len(group) for group in groups))
        return super().execute_model(scheduler_output)
