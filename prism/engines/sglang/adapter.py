"""Import and creation of SGLang engines (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
import logging
import os
import warnings

from kvcached.engines.sglang.hybrid.overrides import WINDOW_POOLS
from prism.config.checks.memory_needs import EngineTraits
from prism.engines.core import EngineContext, EngineCore
from prism.engines.sglang.platform import gpu, supported_models

# With more threads, OpenMP's barriers spin against the other engines of the machine, and a
# process with a started thread pool must not be forked.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")

# Loggers that warn about missing accelerators and optional packages.
_VERBOSE_LOGGERS = ("sglang", "transformers", "torch.distributed")

# Environment variable with the names of those loggers that keep their warnings, comma-separated.
WARNINGS_VARIABLE = "PRISM_ENGINE_WARNINGS"


def preload(device: str = "host:0") -> None:
    """Imports torch, transformers and SGLang (8 s on a small machine); starts no thread."""
    gpu.prepare(device)
    for name, value in zip(_ONE_THREAD, ("1", "1", "false"), strict=True):
        os.environ.setdefault(name, value)
    for name in _VERBOSE_LOGGERS:
        if name not in os.environ.get(WARNINGS_VARIABLE, "").split(","):
            logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("sglang.srt.constrained").setLevel(logging.CRITICAL)  # it logs grammars
    with warnings.catch_warnings(), gpu.importing(device):
        warnings.simplefilter("ignore", UserWarning)
        host = importlib.import_module("prism.engines.sglang.host")
        host.import_models()
        importlib.import_module("prism.engines.sglang.core")


def traits() -> EngineTraits:
    """Returns the traits: as configured, with LoRA adapters, quantized weights, pools for windows,
    KV in other types, images, and what can be divided over ranks."""
    return EngineTraits(
        lora=True,
        quantized=supported_models.quantizations(),
        window_pools=WINDOW_POOLS,
        windows=supported_models.WINDOWS,
        whole_weights=supported_models.WHOLE_WEIGHTS,
        divided_heads=supported_models.DIVIDED_HEADS,
        kv_dtypes=gpu.KV_ATTENTION,
        latent_attention=frozenset({gpu.TRITON}),
        images=frozenset(supported_models.IMAGES),
        image_ranks=supported_models.IMAGE_RANKS,
        image_adapters=supported_models.IMAGE_ADAPTERS,
        image_vectors_bytes=supported_models.VECTORS_KEPT_MIB << 20,
    )


def create(context: EngineContext) -> EngineCore:
    """Creates the core. Raises kvcached's errors if the device cannot be opened."""
    from prism.engines.sglang.core import SglangCore

    return SglangCore(context)
