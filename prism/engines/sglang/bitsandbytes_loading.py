"""Load of weights that bitsandbytes quantized to four or eight bits.

SGLang's loader keeps what describes a matrix (scales, tables) in attributes of its parameter, on
the device. Here they are parameters, too, so that they are in leased pages and in the weight store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.quantization.bitsandbytes import BitsAndBytesLinearMethod
from torch import nn

from kvcached import Checkpoint
from prism.errors import ActivationError

METHOD = BitsAndBytesLinearMethod
# Tensors that describe a matrix, after its name, in four bits or eight.
_STATE = re.compile(
    r"(.+)\.(?:weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)|(SCB))"
)
_FORMAT = ".weight_format"  # ends the name of a number that says that eight bits are in rows
_PREFIX = "bitsandbytes_"


def make_states(model: nn.Module, path: Path) -> dict[str, nn.Parameter]:
    """Adds parameters for what describes the matrices of a model that was built on the meta device.
    Returns them by their names in the files. Raises ActivationError for a matrix that the model
    does not have so."""
    modules, made = dict(model.named_modules()), dict[str, nn.Parameter]()
    for name, tensor in Checkpoint.open(path).tensors.items():
        if (match := _STATE.fullmatch(name)) is None:
            continue
        place, shard = _place(match[1], model.bitsandbytes_stacked_params_mapping)
        module = modules.get(place)
        if module is None or not isinstance(getattr(module, "quant_method", None), METHOD):
            raise ActivationError(
                f"the files have {match[1]} quantized, but SGLang does not expect it so; correct"
                " llm_int8_skip_modules in config.json"
            )
        dtype = getattr(torch, tensor.spec.dtype)
        empty = torch.empty(tensor.spec.shape, dtype=dtype, device="meta")
        made[name] = nn.Parameter(empty, requires_grad=False)
        part = (match[2] or match[3]).replace(".", "-")
        module.register_parameter(f"{_PREFIX}{shard}-{part}", made[name])
    return made


def other_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], states: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that are not of `states`, which it writes."""
    for name, tensor in tensors:
        if name in states:
            states[name].data.copy_(tensor)
        elif not name.endswith(_FORMAT):
            yield name, tensor


def attach_states(module: nn.Module) -> None:
    """Sets the attributes of a module's weight that its method reads, over its parameters. Raises
    ActivationError for a matrix without scales."""
    weight, parts = module.weight, dict[int, dict[str, torch.Tensor]]()
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith(_PREFIX):
            shard, part = name.removeprefix(_PREFIX).split("-", 1)
            content = parameter.data.cpu() if part.startswith("quant_state") else parameter.data
            parts.setdefault(int(shard), {})[part.replace("-", ".")] = content
    states = {shard: _state(parts[shard], weight.device) for shard in sorted(parts)}
    sizes = [prod(state.shape) // weight.pack_factor for state in states.values()]
    if sum(sizes) != len(weight):
        raise ActivationError(
            "the files lack scales of a matrix that config.json describes as quantized; complete"
            " llm_int8_skip_modules, or the files"
        )
    weight.bnb_quant_state = states
    weight.bnb_shard_offsets = torch.tensor([0, *accumulate(sizes)])
    weight.matmul_state = [None] * len(states)


def _state(parts: dict[str, torch.Tensor], device: torch.device) -> Any:
    """Returns what a method reads of a matrix: bitsandbytes' object, or scales of eight bits."""
    from bitsandbytes.functional import QuantState

    return parts["SCB"] if "SCB" in parts else QuantState.from_dict(parts, device)


def _place(name: str, fused: Mapping[str, tuple[str, int]]) -> tuple[str, int]:
    """Returns the path of the module that has a matrix, and the matrix's number in it."""
    for part, (whole, shard) in fused.items():
        if part in name:
            return name.replace(part, whole), shard
    return name, 0
