"""SGLang's loader for weights that live in kvcached pages.

The model is built with its parameters on the meta device, so nothing is allocated for them; then
they become views of mapped pages, and SGLang's own weight loaders (which fuse and shard) write
into those. Device memory never holds a second copy of a weight.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader import loader as stock
from torch import nn
from torch.overrides import TorchFunctionMode

from prism.engines.sglang.memory import EngineMemory, active_memory
from prism.engines.sglang.weights import space_for, tensor_bytes
from prism.errors import SelfCheckError

log = logging.getLogger("prism.engine")


class EmptyOnMeta(TorchFunctionMode):  # type: ignore[misc]
    """`torch.empty` makes meta tensors: what it returns has no content that could be lost. All
    else is made for real: tables (rotary), ones of norms, masks."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class KvcachedLoader(stock.DefaultModelLoader):  # type: ignore[misc]
    """SGLang takes a class as its load format and calls `load_model`."""

    def __init__(self, load_config: Any) -> None:
        files = {"load_format": LoadFormat.SAFETENSORS}
        super().__init__(dataclasses.replace(load_config, **files))

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        memory = active_memory()
        device = torch.device(device_config.device)
        with stock.set_default_torch_dtype(model_config.dtype):
            model = self._build(model_config, device)
            place(model, memory)
            memory.timeline.enter("weights")
            weights = self._get_all_weights(model_config, model)
            self.load_weights_and_postprocess(model, weights, device)
        check(model, memory)
        memory.timeline.enter("build")
        return model.eval()

    def _build(self, model_config: Any, device: torch.device) -> nn.Module:
        """On the meta device. A model that fills what `torch.empty` gave it is built again on
        the device: its parameters then exist twice while they move into their pages."""
        quantization = stock._get_quantization_config(model_config, self.load_config)

        def build() -> nn.Module:
            model: nn.Module = stock._initialize_model(model_config, self.load_config, quantization)
            return model

        with device:
            with EmptyOnMeta():
                model = build()
            lost = sorted(name for name, tensor in others(model) if tensor.is_meta)
            if lost:
                log.warning("%s is not built on the meta device", ", ".join(lost))
                return build()
            return model


def place(model: nn.Module, memory: EngineMemory) -> None:
    """Make every parameter a view of the weights' pages; those with a content keep it.

    A parameter that several modules share is placed once. Raises NoRoomError.
    """
    parameters = list(model.parameters())
    memory.map_weights(space_for(parameters))
    for parameter in parameters:
        room = memory.weights.take(parameter)
        if parameter.is_meta:
            _materialise(parameter, room)
        else:
            parameter.data = room.copy_(parameter.data)


def _materialise(parameter: nn.Parameter, room: torch.Tensor) -> None:
    """The same object, with its class and attributes (weight loaders), gets real memory."""
    real = nn.Parameter(room, requires_grad=False)
    real.__class__ = parameter.__class__
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def check(model: nn.Module, memory: EngineMemory) -> None:
    """Raises SelfCheckError unless every tensor of the model is real and every parameter lies in
    kvcached pages."""
    strays = {n: t for n, t in model.named_parameters() if not memory.weights.holds(t)}
    if strays:
        size_bytes = sum(tensor_bytes(t) for t in strays.values())
        raise SelfCheckError(
            f"{size_bytes} bytes of parameters lie outside of the ledger's pages after loading"
            f" ({_some(strays)})"
        )
    lost = [name for name, tensor in others(model) if tensor.is_meta]
    if lost:
        raise SelfCheckError(f"tensors without memory after loading ({_some(lost)})")


def others(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the model that are no parameters: buffers, and plain attributes of modules."""
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:3])
