"""Two quantisation methods of plain torch for SGLang, and checkpoints in their formats.

`Packed` stores four-bit weights as GPTQ does, and repacks them as Marlin's kernels need it: other
shapes and types, dropped zeros, a workspace in an object of the layer. `Scaled` stores float8
weights, which it transposes without a copy, as SGLang's FP8 method does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.parameter import (
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from torch import nn

GROUP = 32
_NIBBLES = torch.arange(8, dtype=torch.int32) * 4
_SUFFIX = "_proj.weight"


class Kernel:
    """Kernel of one layer, with state that loading sets."""

    workspace: torch.Tensor | None = None
    tile: tuple[int, int] | None = None


class Packed(LinearMethodBase):  # type: ignore[misc]
    def create_weights(
        self,
        layer: nn.Module,
        *,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        outputs, inputs = sum(output_partition_sizes), input_size_per_partition
        common = {"input_dim": 0, "output_dim": 1, "weight_loader": weight_loader}
        whole = {"packed_factor": 8, **common}
        words = torch.empty(inputs // 8, outputs, dtype=torch.int32)
        zeros = torch.empty(inputs // GROUP, outputs // 8, dtype=torch.int32)
        scales = torch.empty(inputs // GROUP, outputs, dtype=params_dtype)
        layer.register_parameter("qweight", PackedvLLMParameter(data=words, packed_dim=0, **whole))
        layer.register_parameter("qzeros", PackedvLLMParameter(data=zeros, packed_dim=1, **whole))
        layer.register_parameter("scales", GroupQuantScaleParameter(data=scales, **common))
        layer.kernel = Kernel()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        values = unpacked(layer.qweight.data, 0)
        zeros = unpacked(layer.qzeros.data, 1)
        pairs = values.t().reshape(values.shape[1], -1, 2)
        packed = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        layer.qweight.data = packed.contiguous()
        shift = (zeros * layer.scales.data).t().contiguous()
        layer.scales = nn.Parameter(layer.scales.data.t(), requires_grad=False)
        del layer.qzeros
        layer.register_buffer("shift", shift)
        layer.kernel.workspace = torch.zeros(16, dtype=torch.int32)
        layer.kernel.tile = (packed.shape[1], 2)
        layer.g_idx = nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
        layer.act_dtype = layer.scales.dtype

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert layer.kernel.workspace is not None
        assert layer.kernel.tile == (layer.qweight.shape[1], 2)
        assert layer.g_idx.numel() == 0
        packed = layer.qweight
        values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).to(layer.act_dtype)
        values = values.view(len(values), -1, GROUP)
        weight = values * layer.scales[..., None] - layer.shift[..., None]
        return nn.functional.linear(x, weight.flatten(1), bias)


class Scaled(LinearMethodBase):  # type: ignore[misc]
    def create_weights(
        self,
        layer: nn.Module,
        *,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        layer.logical_widths = output_partition_sizes
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(output_partition_sizes), dtype=torch.float32)
        dims = {"input_dim": 1, "output_dim": 0}
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, weight_loader=weight_loader, **dims)
        )
        layer.register_parameter(
            "weight_scale", PerTensorScaleParameter(data=scale, weight_loader=weight_loader)
        )
        layer.register_parameter("input_scale", None)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        widths = torch.tensor(layer.logical_widths)
        scale = layer.weight_scale.data.repeat_interleave(widths)
        layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        layer.weight_scale.power_of_two = False
        del layer.input_scale

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert layer.weight.stride(0) == 1
        assert layer.weight_scale.power_of_two is False
        weight = layer.weight.t().to(torch.float32) * layer.weight_scale[:, None]
        return nn.functional.linear(x, weight, bias)


class PlainConfig(QuantizationConfig):  # type: ignore[misc]
    method: type[LinearMethodBase]

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainConfig:
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        return self.method() if isinstance(layer, LinearBase) else None


class PackedConfig(PlainConfig):
    method = Packed


class ScaledConfig(PlainConfig):
    method = Scaled


METHODS = {"torch_packed": PackedConfig, "torch_scaled": ScaledConfig}


def quantized(source: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """Writes a model in a method's format, and the same weights in float32. Returns both paths."""
    made, plain = folder / method, folder / f"{method}-plain"
    quantize = {"torch_packed": _packed, "torch_scaled": _scaled}[method]
    stored, exact = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        parts, same = quantize(tensor.float()) if name.endswith(_SUFFIX) else ({}, tensor)
        prefix = name.removesuffix("weight")
        stored |= {prefix + part: each for part, each in parts.items()} or {name: tensor}
        exact[name] = same
    for path, tensors in ((made, stored), (plain, exact)):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (made / "config.json").write_text(json.dumps(config))
    return made, plain


def _packed(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(0, 15)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    exact = values * scales[..., None] - (zeros * scales)[..., None]
    parts = {
        "qweight": _words(values.flatten(1).t().to(torch.int32), 0),
        "qzeros": _words(zeros.t().to(torch.int32), 1),
        "scales": scales.t().contiguous(),
    }
    return parts, exact.flatten(1)


def _words(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns words of eight values each, along a dimension."""
    eights = values.movedim(dim, -1).unflatten(-1, (-1, 8))
    return (eights << _NIBBLES).sum(-1, dtype=torch.int32).movedim(-1, dim).contiguous()


def unpacked(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the values of `_words`."""
    values = (words.movedim(dim, -1)[..., None] >> _NIBBLES) & 15
    return values.flatten(-2).movedim(-1, dim)


def _scaled(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale.view(())}, small.float() * scale
