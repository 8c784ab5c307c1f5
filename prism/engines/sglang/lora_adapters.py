"""LoRA adapters of the active model, served by SGLang.

SGLang keeps adapters on the host and copies those of a step into slots on the device. Prism does
not use SGLang's tokenizer manager, which would load them and count their uses; `Adapters` does
both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from sglang.srt.lora.backend.lora_registry import register_lora_backend
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.lora.lora_registry import LoRARef
from torch.overrides import TorchFunctionMode

from prism.engines.ranks.group import RankGroup
from prism.engines.sglang.platform import gpu
from prism.errors import RequestError
from prism.messages.model_spec import LoraAdapter, LoraSpec, ModelSpec
from prism.models.lora_files import CONFIG, FUSED, WEIGHTS, module_of

Done = TypeVar("Done")

_ON_HOST, _ON_GPU = "prism_host", "csgmv"


class AdapterError(RequestError):
    """An adapter's files, which were valid at the start, cannot be loaded."""

    code = "adapter_unavailable"
    status = 503


@register_lora_backend(_ON_HOST)  # type: ignore[untyped-decorator]
def _host_backend() -> type[TorchNativeLoRABackend]:
    return HostBackend


class Unpinned(TorchFunctionMode):  # type: ignore[misc]
    """Context in which pinned memory is ordinary memory. Without an accelerator torch cannot pin
    memory, which SGLang's layers with adapters always request."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(
            *args, **{name: v for name, v in (kwargs or {}).items() if name != "pin_memory"}
        )


class HostBackend(TorchNativeLoRABackend):  # type: ignore[misc]
    """SGLang's torch backend for a host device."""

    name = _ON_HOST

    def prepare_lora_batch(self, *args: Any, **kwargs: Any) -> None:
        with Unpinned():
            super().prepare_lora_batch(*args, **kwargs)


def settings(lora: LoraSpec, device: str) -> dict[str, Any]:
    """Returns SGLang's arguments. The base model takes one slot more."""
    if not lora.adapters:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(lora.shapes),
        "max_loras_per_batch": lora.slots + 1,
        "lora_backend": _ON_GPU if gpu.is_gpu(device) else _ON_HOST,
    }


def with_fused_zeros(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Returns the tensors with zeros for modules that the adapter does not change, but that SGLang
    fuses with a changed one: SGLang expects all of them."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        parts = name.rsplit(".", 3)  # ..., module, lora_A or lora_B, weight
        for group in (group for group in FUSED if parts[1] in group):
            for module in group:
                other = f"{parts[0]}.{module}.{parts[2]}.weight"
                size = list(tensor.shape)
                if parts[2] == "lora_B":
                    size[0] = shapes[module][1]
                found.setdefault(other, tensor.new_zeros(size))
    return found


class Adapters:
    """Adapters of a model that SGLang holds on the host: those of open requests, and as many others
    as there are slots. Thread rule: the engine's thread."""

    def __init__(self, scheduler: Any, model: ModelSpec, ranks: RankGroup) -> None:
        self._scheduler, self._ranks = scheduler, ranks
        self._model, self._lora = model, model.lora
        self.loaded: dict[str, LoRARef] = {}  # the most recently used one is last

    def require(self, name: str) -> None:
        """Loads an adapter unless it is loaded. Raises AdapterError.

        Reads the adapter's files in the engine's thread, like SGLang, while other requests wait.
        """
        if name in self.loaded:
            self.loaded[name] = self.loaded.pop(name)
            return
        adapter = self._adapter_of(name)
        tensors, config = self._on_all_ranks(name, lambda: self._read(adapter))
        self._unload_unused()
        ref = LoRARef(lora_id=name, lora_name=name, lora_path=adapter.path, pinned=False)
        try:
            self._on_all_ranks(name, lambda: self._load(ref, tensors, config))
        except AdapterError:
            self._manager.unload_lora_adapter(ref)
            raise
        self.loaded[name] = ref

    def _on_all_ranks(self, name: str, work: Callable[[], Done]) -> Done:
        """Returns the result of `work` if it succeeds on every rank, since all ranks must have the
        same adapters to run the same requests. Raises AdapterError."""
        failed = AdapterError(f"the adapter {name} cannot be loaded on another rank's device")
        done: list[Done] = []
        try:
            done.append(work())
        except AdapterError as error:
            failed = error
        if not self._ranks.all_true(bool(done)):
            raise failed
        return done[0]

    def _load(self, ref: LoRARef, tensors: Mapping[str, torch.Tensor], config: Any) -> None:
        result = self._manager.load_lora_adapter_from_tensors(ref, tensors, config)
        if not result.success:
            text = f"the adapter {ref.lora_name} cannot be loaded: {result.error_message}"
            raise AdapterError(text)

    def _adapter_of(self, name: str) -> LoraAdapter:
        if (adapter := self._lora.adapter(name)) is None:
            raise AdapterError(f"this engine's model does not have an adapter {name!r:.80}")
        return adapter

    def _read(self, adapter: LoraAdapter) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Reads and checks an adapter's files. Prism checked them at its start, but files that have
        become invalid would end the engine at the next step."""
        path, layers = Path(adapter.path), self._model.num_layers
        try:
            config = json.loads((path / CONFIG).read_text())
            tensors = load_file(path / WEIGHTS)
            for name, tensor in tensors.items():
                module_of(name, tensor.shape, adapter.rank, layers, self._lora.shapes)
            if config["r"] != adapter.rank:
                raise ValueError("its rank has changed")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise AdapterError(f"the adapter {adapter.name} cannot be loaded: {error}") from error
        return with_fused_zeros(tensors, self._lora.shapes), config

    def _unload_unused(self) -> None:
        """Unloads adapters without open requests, until there is a slot for one more."""
        used = {req.lora_id for req in self._scheduler.open_reqs()}
        unused = [name for name in self.loaded if name not in used]
        for name in unused[: len(self.loaded) - self._lora.slots + 1]:
            self._manager.unload_lora_adapter(self.loaded.pop(name))

    @property
    def _manager(self) -> Any:
        return self._scheduler.tp_worker.model_runner.lora_manager
