"""Stock SGLang server on a GPU: leases its memory other than KV before SGLang allocates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.model_loader.weight_utils import download_weights_from_hf
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_device

from kvcached.engines import gpu_share
from kvcached.engines.sglang import server

_FLAG = "--mem-fraction-static"
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
    gpu_share.lease(memory.share, index, need_bytes)
    current_platform.memory = memory
    with gpu_share.within(need_bytes, _FLAG):
        original(scheduler)


def _need_bytes(scheduler: Any, index: int) -> int:
    model, arguments = scheduler.model_config, scheduler.server_args
    folder = model.model_path
    if not Path(folder).is_dir():
        patterns = list(gpu_share.WEIGHTS)
        folder = download_weights_from_hf(folder, arguments.download_dir, patterns, model.revision)
    return gpu_share.need_bytes(folder, index, arguments.mem_fraction_static)
