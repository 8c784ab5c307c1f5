"""The two functions of an engine adapter (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
import os

from prism.engines.core import EngineContext, EngineCore

# With more threads, OpenMP's barriers spin against the other engines of the machine, and a
# process with a started thread pool must not be forked.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def preload() -> None:
    """Import torch, transformers and SGLang (8 s on a small machine); start no thread."""
    for name, value in zip(_ONE_THREAD, ("1", "1", "false"), strict=True):
        os.environ.setdefault(name, value)
    core = importlib.import_module("prism.engines.sglang.core")
    core.host.quiet()
    core.host.import_models()


def create(context: EngineContext) -> EngineCore:
    """Raises kvcached's errors when the device cannot be opened."""
    from prism.engines.sglang.core import SglangCore

    return SglangCore(context)
