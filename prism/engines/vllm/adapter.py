"""Import and creation of vLLM engines (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
import logging
import os
import warnings

from prism.engines.core import EngineContext, EngineCore

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


def preload(device: str = "host:0") -> None:
    """Imports torch and vLLM (10 s on a small machine); starts no thread."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.pop("KVCACHED_DEVICE", None)  # set for stock servers, which an engine is not
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("prism.engines.vllm.core")
        importlib.import_module("vllm.model_executor.models.llama")


def create(context: EngineContext) -> EngineCore:
    """Creates the core. Raises kvcached's errors if the device cannot be opened."""
    from prism.engines.vllm.core import VllmCore

    return VllmCore(context)
