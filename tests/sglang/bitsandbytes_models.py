"""Checkpoints of bitsandbytes, and what SGLang calls of that package in plain torch.

The package itself is used where it is installed. Four bits (NF4): two numbers a byte, 64 numbers
with a scale, and 256 scales with a scale of a second kind. Eight bits: a scale for each row.
"""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

BLOCK, NESTED = 64, 256
_BELOW = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
_BELOW_0 = (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
_ABOVE_0 = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
_ABOVE = (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
NF4 = torch.tensor((*_BELOW, *_BELOW_0, *_ABOVE_0, *_ABOVE))
NESTED_CODE = torch.linspace(-1, 1, 256)


def write(
    source: Path, folder: Path, *, bits: int = 4, double: bool = False, skipped: str = ""
) -> tuple[Path, Path]:
    """Writes a quantised model, and the same weights in float32. Returns both paths.

    Args:
        bits: of each number, 4 or 8.
        double: also quantise the scales of four bits.
        skipped: module whose matrices stay as they are.
    """
    made, plain = folder / "nf4", folder / "plain"
    stored, exact = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        same = tensor.bfloat16()
        is_kept = "_proj.weight" not in name or (skipped and skipped in name)
        if is_kept:
            parts, values = {name: same}, same.float()
        elif bits == 8:
            parts, values = in_eight_bits(name, tensor.float())
        else:
            parts = quantised(name, tensor.float(), double)
            values = dequantised(name, parts)
        stored |= parts
        exact[name] = values
    for path, tensors in ((made, stored), (plain, exact)):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "llm_int8_skip_modules": [skipped] if skipped else None,
    }
    config["dtype"] = "bfloat16"
    (made / "config.json").write_text(json.dumps(config))
    return made, plain


def in_eight_bits(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns a matrix with its scales, and its numbers."""
    scales = weight.abs().amax(1)
    small = (weight / scales[:, None] * 127).round().to(torch.int8)
    module = name.removesuffix("weight")
    parts = {name: small, f"{module}SCB": scales}
    parts[f"{module}weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return parts, small * scales[:, None] / 127


def quantised(name: str, weight: torch.Tensor, double: bool) -> dict[str, torch.Tensor]:
    blocks = weight.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None])[..., None].sub(NF4).abs().argmin(-1).flatten()
    facts = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16"}
    facts |= {"shape": list(weight.shape)}
    parts = {"absmax": scales, "quant_map": NF4.clone()}
    if double:
        offset = float(scales.mean())
        rest = nn.functional.pad(scales - offset, (0, -len(scales) % NESTED)).view(-1, NESTED)
        largest = rest.abs().amax(1)
        nested = (rest / largest[:, None])[..., None].sub(NESTED_CODE).abs().argmin(-1)
        parts["absmax"] = nested.flatten()[: len(scales)].to(torch.uint8)
        parts |= {"nested_absmax": largest, "nested_quant_map": NESTED_CODE.clone()}
        facts |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    packed = json.dumps(facts).encode()
    parts["quant_state.bitsandbytes__nf4"] = torch.tensor(list(packed), dtype=torch.uint8)
    matrix = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    return {name: matrix, **{f"{name}.{part}": each for part, each in parts.items()}}


def dequantised(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = {n.removeprefix(f"{name}."): t for n, t in stored.items() if n.startswith(f"{name}.")}
    return values_of(stored[name], State.from_dict(parts, torch.device("cpu")))


def values_of(matrix: torch.Tensor, state: State) -> torch.Tensor:
    """Returns the numbers of a matrix in float32."""
    scales = state.absmax
    if state.state2 is not None:
        nested = state.state2
        larger = nested.absmax.repeat_interleave(nested.blocksize)[: len(scales)]
        scales = nested.code[scales.long()] * larger + state.offset
    bytes_ = matrix.flatten()
    codes = torch.stack((bytes_ >> 4, bytes_ & 15), -1).flatten().long()
    values = state.code[codes].view(-1, state.blocksize) * scales[:, None]
    return values.view(state.shape)


# --- the package -----------------------------------------------------------------------------


@dataclass
class State:
    """QuantState of bitsandbytes."""

    absmax: torch.Tensor
    code: torch.Tensor
    blocksize: int
    shape: torch.Size | None = None
    offset: torch.Tensor | None = None
    state2: State | None = None

    @classmethod
    def from_dict(cls, parts: dict[str, torch.Tensor], device: torch.device) -> State:
        [packed] = (each for name, each in parts.items() if name.startswith("quant_state."))
        assert packed.device.type == "cpu"
        facts = json.loads(bytes(packed.tolist()))
        nested = None
        if "nested_offset" in facts:
            maps = parts["nested_absmax"], parts["nested_quant_map"]
            nested = cls(*maps, facts["nested_blocksize"])
        return cls(
            parts["absmax"],
            parts["quant_map"],
            facts["blocksize"],
            torch.Size(facts["shape"]),
            torch.tensor(facts.get("nested_offset", 0.0)),
            nested,
        )


def matmul_4bit(x: torch.Tensor, matrix: torch.Tensor, state: State) -> torch.Tensor:
    return nn.functional.linear(x, values_of(matrix.t(), state).to(x.dtype))


class LtState:
    """MatmulLtState of bitsandbytes."""

    CB: torch.Tensor
    SCB: torch.Tensor
    CxB = None


def matmul(x: torch.Tensor, _: torch.Tensor, state: LtState) -> torch.Tensor:
    """Multiplies by a matrix in eight bits. bitsandbytes rounds `x` to eight bits, too."""
    values = state.CB.float() * state.SCB[:, None] / 127
    return nn.functional.linear(x.float(), values)


class Int8Params(nn.Parameter):
    def __new__(cls, data: torch.Tensor, has_fp16_weights: bool, requires_grad: bool) -> Any:
        return torch.Tensor._make_subclass(cls, data, requires_grad)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the package importable, if it is not installed."""
    if find_spec("bitsandbytes") is not None:
        return
    package: Any = types.ModuleType("bitsandbytes")
    package.__version__, package.matmul_4bit = "0.46.1", matmul_4bit
    package.functional, package.nn = types.ModuleType("functional"), types.ModuleType("nn")
    package.functional.QuantState = State
    package.nn.Int8Params = Int8Params
    package.MatmulLtState, package.matmul = LtState, matmul
    for name, module in (("", package), (".functional", package.functional), (".nn", package.nn)):
        monkeypatch.setitem(sys.modules, f"bitsandbytes{name}", module)
