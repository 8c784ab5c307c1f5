"""A stock SGLang server on a GPU: what it takes beside its KV is leased before it is taken.

The device's ledger promises pages to all engines, so nobody may find memory that it has not: torch,
which holds weights, activations and graphs, is kept below a cap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import download_weights_from_hf
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_device

from kvcached.engines.sglang import gpu, server
from kvcached.errors import InvalidArgumentError, NoRoomError
from kvcached.tools.sizes import format_size

# The CUDA context, the code of SGLang's and torch's kernels, graphs: planned for an H200.
DRIVER_BYTES = 1 << 30
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_LOAD = "sglang.srt.managers.scheduler.Scheduler.init_tp_model_worker"


def install() -> None:
    """In a process that has imported SGLang's scheduler. Raises what `server.install_hooks`
    raises."""
    server.install_hooks({_LOAD: (load, HookType.AROUND)})


def load(original: Callable[..., Any], scheduler: Any) -> None:
    """Around the making of what holds the model. Raises NoRoomError, InvalidArgumentError."""
    memory, index = server.ServerMemory(), get_device().gpu_id
    need_bytes = memory.stake.settings.static_bytes or _need_bytes(scheduler, index)
    if need_bytes <= DRIVER_BYTES:
        raise InvalidArgumentError(
            f"KVCACHED_STATIC is {format_size(need_bytes)}, and CUDA alone takes up to "
            f"{format_size(DRIVER_BYTES)} of it: raise it, or unset it"
        )
    memory.stake.lease_static(need_bytes)
    gpu.adopt(memory.stake.client, index, need_bytes - DRIVER_BYTES)
    current_platform.memory = memory
    try:
        original(scheduler)
    except torch.OutOfMemoryError as error:
        raise NoRoomError(
            f"the model does not fit into the {format_size(need_bytes)} leased beside its KV: "
            "set KVCACHED_STATIC, or lower --mem-fraction-static",
            need_bytes,
            need_bytes,
        ) from error


def _need_bytes(scheduler: Any, index: int) -> int:
    """The weights' files, and what SGLang keeps of the GPU's memory beside weights and KV
    (--mem-fraction-static): contexts, activations, graphs."""
    arguments = scheduler.server_args
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    beside_bytes = int((1 - arguments.mem_fraction_static) * total_bytes)
    return _files_bytes(scheduler.model_config, arguments) + beside_bytes


def _files_bytes(model: Any, arguments: Any) -> int:
    folder = model.model_path
    if not Path(folder).is_dir():
        patterns = list(_WEIGHTS)
        folder = download_weights_from_hf(folder, arguments.download_dir, patterns, model.revision)
    for pattern in _WEIGHTS:  # of several forms SGLang takes the first
        sizes = [path.stat().st_size for path in Path(folder).glob(pattern)]
        if sizes:
            return sum(sizes)
    raise InvalidArgumentError(
        f"{folder} has no weights to measure ({', '.join(_WEIGHTS)}): set KVCACHED_STATIC to what "
        "the server takes beside its KV"
    )
