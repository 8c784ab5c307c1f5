"""What a stock vLLM server is told at its start (`kvcached_plugins.vllm_general` calls it).

In every process of vLLM. The arguments are checked, and completed, where they are put together: in
the process that the user started, before another one is.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCoreProc

from kvcached.engines.settings import Settings
from kvcached.engines.vllm.contract import CONTRACT

SCHEDULER = "kvcached.engines.vllm.scheduler.ElasticScheduler"
WORKER = "kvcached.engines.vllm.worker.ElasticWorker"

# Arguments that lead to KV caches, processes or ranks that are not on kvcached: where vLLM keeps
# them, what they may be, and how one writes them.
_ONLY = {
    "parallel_config.tensor_parallel_size": ((1,), "--tensor-parallel-size"),
    "parallel_config.pipeline_parallel_size": ((1,), "--pipeline-parallel-size"),
    "parallel_config.data_parallel_size": ((1,), "--data-parallel-size"),
    "speculative_config": ((None,), "--speculative-config"),
    "kv_transfer_config": ((None,), "--kv-transfer-config"),
    "attention_config.hisparse_config": ((None,), "--attention-config"),
    "cache_config.num_gpu_blocks_override": ((None,), "--num-gpu-blocks-override"),
    "cache_config.kv_offloading_size": ((None,), "--kv-offloading-size"),
    "scheduler_config.scheduler_cls": ((None, SCHEDULER), "--scheduler-cls"),
    "parallel_config.worker_cls": (("auto", WORKER), "--worker-cls"),
}
_logger = init_logger("vllm.kvcached")


def install() -> None:
    """Idempotent. Raises RuntimeError if vLLM lacks what the adapter relies on."""
    if hasattr(EngineCoreProc.run_busy_loop, "kvcached"):
        return
    CONTRACT.check(vllm.__version__, _logger.warning)
    platform: Any = type(current_platform)
    stock_check = platform.check_and_update_config.__func__

    @functools.wraps(stock_check)
    def check_and_update_config(cls: Any, config: Any) -> None:
        _check_arguments(config)
        stock_check(cls, config)
        _complete(config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    stock_loop = EngineCoreProc.run_busy_loop

    @functools.wraps(stock_loop)
    def run_busy_loop(core: Any) -> None:
        from kvcached.engines.vllm.scheduler import begin

        begin(core)
        stock_loop(core)

    run_busy_loop.kvcached = True  # type: ignore[attr-defined]
    EngineCoreProc.run_busy_loop = run_busy_loop


def _check_arguments(config: Any) -> None:
    """Raises NotImplementedError. vLLM comes again with a configuration that it has changed."""
    for path, (allowed, flag) in _ONLY.items():
        found = functools.reduce(getattr, path.split("."), config)
        if found not in allowed:
            raise NotImplementedError(
                f"{flag} ({found!r}) is not served on kvcached: leave it out, or unset "
                "KVCACHED_DEVICE"
            )


def _complete(config: Any) -> None:
    """Raises what Settings.open_device raises."""
    # vLLM would want as much free memory as its share of the machine, and say so if there is less.
    if config.cache_config.kv_cache_memory_bytes is None:
        device = Settings.from_environment(os.environ).open_device()
        config.cache_config.kv_cache_memory_bytes = device.capacity_bytes
    config.scheduler_config.scheduler_cls = SCHEDULER
    config.parallel_config.worker_cls = WORKER
    # Scheduler and KV in one process: blocks are mapped where they are counted.
    config.parallel_config.distributed_executor_backend = "uni"
