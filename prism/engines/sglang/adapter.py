"""The functions of an engine adapter (see `prism.engines.core`)."""

from __future__ import annotations

import importlib
import logging
import os
import warnings

from prism.config.memory import EngineTraits
from prism.engines.core import EngineContext, EngineCore
from prism.engines.sglang import gpu

# With more threads, OpenMP's barriers spin against the other engines of the machine, and a
# process with a started thread pool must not be forked.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")

# They tell which accelerators and optional packages they do not find.
_TALKATIVE = ("sglang", "transformers", "torch.distributed")

# Names of loggers among them that keep their warnings, with commas between.
WARNINGS_VARIABLE = "PRISM_ENGINE_WARNINGS"


def preload(device: str = "host:0") -> None:
    """Import torch, transformers and SGLang (8 s on a small machine); start no thread."""
    gpu.prepare(device)
    for name, value in zip(_ONE_THREAD, ("1", "1", "false"), strict=True):
        os.environ.setdefault(name, value)
    for name in _TALKATIVE:
        if name not in os.environ.get(WARNINGS_VARIABLE, "").split(","):
            logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("sglang.srt.constrained").setLevel(logging.CRITICAL)  # it logs grammars
    with warnings.catch_warnings(), gpu.importing(device):
        warnings.simplefilter("ignore", UserWarning)
        host = importlib.import_module("prism.engines.sglang.host")
        host.import_models()
        importlib.import_module("prism.engines.sglang.core")


def traits() -> EngineTraits:
    """As the configuration says."""
    return EngineTraits(lora=True)


def create(context: EngineContext) -> EngineCore:
    """Raises kvcached's errors when the device cannot be opened."""
    from prism.engines.sglang.core import SglangCore

    return SglangCore(context)
