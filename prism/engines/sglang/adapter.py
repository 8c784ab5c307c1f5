"""The functions of an engine adapter (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from importlib.metadata import version

from kvcached import WeightKey
from prism.engines.core import EngineContext, EngineCore
from prism.engines.sglang import gpu
from prism.messages import ModelSpec

# With more threads, OpenMP's barriers spin against the other engines of the machine, and a
# process with a started thread pool must not be forked.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")

# They tell which accelerators and optional packages they do not find.
_TALKATIVE = ("sglang", "transformers", "torch.distributed")


def lacks(device: str) -> str:
    return gpu.lacks(device)


def preload(device: str = "host:0") -> None:
    """Import torch, transformers and SGLang (8 s on a small machine); start no thread."""
    gpu.prepare(device)
    for name, value in zip(_ONE_THREAD, ("1", "1", "false"), strict=True):
        os.environ.setdefault(name, value)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        host = importlib.import_module("prism.engines.sglang.host")
        host.import_models()
        importlib.import_module("prism.engines.sglang.core")


def create(context: EngineContext) -> EngineCore:
    """Raises kvcached's errors when the device cannot be opened."""
    from prism.engines.sglang.core import SglangCore

    return SglangCore(context)


def weight_key(
    content: str, spec: ModelSpec, rank: int = 0, ranks: int = 1, device: str = "host:0"
) -> WeightKey:
    """Parameters as SGLang's loaders fuse and shard them for its kernels: native ones on a CPU."""
    kernels = "cuda" if gpu.is_gpu(device) else "native"
    return WeightKey(content, f"sglang {version('sglang')} {kernels}", spec.dtype, rank, ranks)
