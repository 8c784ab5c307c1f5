"""Stock SGLang server on a GPU: leases its memory other than KV before SGLang allocates it.

The device's ledger promises pages to all engines, so each engine must stay within its leases.
torch, which allocates weights, activations and graphs, is kept below a cap.
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

# CUDA context, code of SGLang's and torch's kernels, and graphs; estimated for an H200.
DRIVER_BYTES = 1 << 30
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_LOAD = "sglang.srt.managers.scheduler.Scheduler.init_tp_model_worker"


def install() -> None:
    """Installs the hook in a process that has imported SGLang's scheduler.

    Raises the errors of `server.install_hooks`.
    """
    server.install_hooks({_LOAD: (load, HookType.AROUND)})


def load(original: Callable[..., Any], scheduler: Any) -> None:
    """Leases memory around the construction of the model's worker.

    Raises NoRoomError, InvalidArgumentError.
    """
    memory, index = server.ServerMemory(), get_device().gpu_id
    need_bytes = memory.share.settings.static_bytes or _need_bytes(scheduler, index)
    if need_bytes <= DRIVER_BYTES:
        raise InvalidArgumentError(
            f"KVCACHED_STATIC is {format_size(need_bytes)}, but CUDA alone takes up to "
            f"{format_size(DRIVER_BYTES)} of it: raise it, or unset it"
        )
    memory.share.lease_static(need_bytes)
    gpu.adopt(memory.share.client, index, need_bytes - DRIVER_BYTES)
    current_platform.memory = memory
    try:
        original(scheduler)
    except torch.OutOfMemoryError as error:
        raise NoRoomError(
            f"the model does not fit into the {format_size(need_bytes)} leased in addition to its "
            "KV: set KVCACHED_STATIC, or lower --mem-fraction-static",
            need_bytes,
            need_bytes,
        ) from error


def _need_bytes(scheduler: Any, index: int) -> int:
    """Returns the size of the weights' files plus SGLang's reserve for memory other than KV.

    The reserve follows from --mem-fraction-static: contexts, activations, graphs.
    """
    arguments = scheduler.server_args
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    reserve_bytes = int((1 - arguments.mem_fraction_static) * total_bytes)
    return _files_bytes(scheduler.model_config, arguments) + reserve_bytes


def _files_bytes(model: Any, arguments: Any) -> int:
    folder = model.model_path
    if not Path(folder).is_dir():
        patterns = list(_WEIGHTS)
        folder = download_weights_from_hf(folder, arguments.download_dir, patterns, model.revision)
    for pattern in _WEIGHTS:  # SGLang takes the first format that it finds
        sizes = [path.stat().st_size for path in Path(folder).glob(pattern)]
        if sizes:
            return sum(sizes)
    raise InvalidArgumentError(
        f"{folder} does not have weights to measure ({', '.join(_WEIGHTS)}): set KVCACHED_STATIC "
        "to the server's memory other than KV"
    )
