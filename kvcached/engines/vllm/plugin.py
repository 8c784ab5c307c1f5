"""Setup of a stock vLLM server (`kvcached_plugins.vllm_general` calls it in every process).

The arguments are checked and completed where vLLM assembles them: in the process that the user
started, before any other process starts.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.core import EngineCoreProc

from kvcached.engines.settings import Settings
from kvcached.engines.vllm.contract import contract

SCHEDULER = "kvcached.engines.vllm.scheduler.ElasticScheduler"
ASYNC_SCHEDULER = "kvcached.engines.vllm.scheduler.ElasticAsyncScheduler"
WORKER = "kvcached.engines.vllm.cpu_worker.ElasticCPUWorker"
GPU_WORKER = "kvcached.engines.vllm.gpu_worker.ElasticGPUWorker"
RANK_WORKER = "kvcached.engines.vllm.rank_worker.RankWorker"
RANK_EXECUTOR = "kvcached.engines.vllm.rank_blocks.RankExecutor"

_ITS_OWN = "kvcached has its own"
_Only = dict[str, tuple[tuple[Any, ...], str, str]]
# Path in vLLM's configuration -> allowed values, flag, reason. Other values lead to KV caches,
# processes or ranks outside of kvcached.
_ONLY: _Only = {
    "parallel_config.pipeline_parallel_size": (
        (1,),
        "--pipeline-parallel-size",
        "each stage has KV of other layers, and so blocks of another size",
    ),
    "parallel_config.data_parallel_size": (
        (1,),
        "--data-parallel-size",
        "start one server for each replica; they share the device",
    ),
    "parallel_config.nnodes": ((1,), "--nnodes", "ranks share blocks on one machine only"),
    "parallel_config.decode_context_parallel_size": (
        (1,),
        "--decode-context-parallel-size",
        "it divides the tokens of a block among ranks",
    ),
    "parallel_config.prefill_context_parallel_size": (
        (1,),
        "--prefill-context-parallel-size",
        "it divides the tokens of a block among ranks",
    ),
    "speculative_config.method": (
        (None, "ngram"),
        "--speculative-config",
        "kvcached does not have a pool for a draft model's KV; ngram is supported",
    ),
    "kv_transfer_config": (
        (None,),
        "--kv-transfer-config",
        "connectors register KV at addresses that must have memory from the start to the end, and "
        "hold blocks that other engines ask for",
    ),
    "attention_config.hisparse_config": (
        (None,),
        "--attention-config",
        "hisparse keeps KV in pools outside of kvcached",
    ),
    "attention_config.backend": (
        (None, *(kernel for kernel in AttentionBackendEnum if kernel.name != "AMX_MLA")),
        "--attention-backend",
        "its kernel needs blocks without gaps between them",
    ),
    "attention_config.backend_per_kind": (
        ({},),
        "--attention-config",
        "backend_per_kind selects kernels that need blocks without gaps between them",
    ),
    "cache_config.num_gpu_blocks_override": (
        (None,),
        "--num-gpu-blocks-override",
        "the number of blocks follows from the device: set KVCACHED_LIMIT",
    ),
    "cache_config.kv_offloading_size": (
        (None,),
        "--kv-offloading-size",
        "it copies blocks while other engines may take their pages",
    ),
    "model_config.enable_cumem_allocator": (
        (None, False),
        "--enable-sleep-mode, --enable-cumem-allocator",
        "vLLM's allocator would have the KV, whose memory kvcached gives to other engines anyway",
    ),
    "scheduler_config.scheduler_cls": (
        (None, SCHEDULER, ASYNC_SCHEDULER),
        "--scheduler-cls",
        _ITS_OWN,
    ),
    "parallel_config.worker_cls": (
        ("auto", WORKER, GPU_WORKER, RANK_WORKER),
        "--worker-cls",
        _ITS_OWN,
    ),
}
# The same on a GPU, in addition.
_ONLY_ON_GPU: _Only = {
    "parallel_config.tensor_parallel_size": (
        (1,),
        "--tensor-parallel-size",
        "ranks have run on host devices only",
    ),
}
_logger = init_logger("vllm.kvcached")


def install() -> None:
    """Installs the adapter. Idempotent.

    Raises RuntimeError if vLLM does not fulfil the contract, NotImplementedError if this vLLM does
    not run on the kind of device.
    """
    if hasattr(EngineCoreProc.run_busy_loop, "kvcached"):
        return
    is_gpu = os.environ["KVCACHED_DEVICE"].startswith("cuda:")
    _check_platform(is_gpu)
    contract("cuda" if is_gpu else "cpu").check(vllm.__version__, _logger.warning)
    platform: Any = type(current_platform)
    stock_check = platform.check_and_update_config.__func__

    @functools.wraps(stock_check)
    def check_and_update_config(cls: Any, config: Any) -> None:
        _check_arguments(config, _ONLY | _ONLY_ON_GPU if is_gpu else _ONLY)
        if is_gpu:
            stock_check(cls, config)
            _complete_on_gpu(config)
            return
        if config.model_config is not None and config.model_config.use_mla:
            # vLLM would choose AMX's kernel, with other blocks, on a CPU that has AMX.
            config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        stock_check(cls, config)
        _complete(config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    stock_loop = EngineCoreProc.run_busy_loop

    @functools.wraps(stock_loop)
    def run_busy_loop(core: Any) -> None:
        from kvcached.engines.vllm.scheduler import start_answering

        start_answering(core)
        stock_loop(core)

    run_busy_loop.kvcached = True  # type: ignore[attr-defined]
    EngineCoreProc.run_busy_loop = run_busy_loop


def _check_platform(is_gpu: bool) -> None:
    if not (current_platform.is_cuda() if is_gpu else current_platform.is_cpu()):
        raise NotImplementedError(
            f"KVCACHED_DEVICE is {os.environ['KVCACHED_DEVICE']}, but this vLLM runs on "
            f"{current_platform.device_name}: set it to a device of that kind, or install vLLM's "
            "build for it"
        )


def _check_arguments(config: Any, only: _Only) -> None:
    """Raises NotImplementedError for unsupported arguments.

    vLLM calls it again with the configuration that it has changed.
    """
    for path, (allowed, flag, reason) in only.items():
        found = functools.reduce(_attribute, path.split("."), config)
        if found not in allowed:
            shown = found.name if isinstance(found, AttentionBackendEnum) else found
            raise NotImplementedError(
                f"{flag} ({shown!r}) is not supported on kvcached ({reason}): leave it out, or "
                "unset KVCACHED_DEVICE"
            )


def _attribute(owner: Any, name: str) -> Any:
    return None if owner is None else getattr(owner, name)


def _complete(config: Any) -> None:
    """Sets the scheduler, the worker and the size. Raises the errors of Settings.open_device."""
    # Otherwise vLLM requires free memory for its share of the machine, and fails if there is less.
    if config.cache_config.kv_cache_memory_bytes is None:
        device = Settings.from_environment(os.environ).open_device()
        config.cache_config.kv_cache_memory_bytes = device.capacity_bytes
    config.scheduler_config.scheduler_cls = SCHEDULER
    parallel = config.parallel_config
    if parallel.tensor_parallel_size == 1:
        # Scheduler and KV share a process, so that blocks are mapped where they are counted.
        parallel.worker_cls, parallel.distributed_executor_backend = WORKER, "uni"
    else:
        parallel.worker_cls = RANK_WORKER
        parallel.distributed_executor_backend = RANK_EXECUTOR


def _complete_on_gpu(config: Any) -> None:
    """Sets the scheduler, the worker and the GPU. The worker sets the size, since CUDA must not
    start in this process, whose children are forked.

    Raises ValueError for another GPU than that of KVCACHED_DEVICE.
    """
    scheduler, parallel = config.scheduler_config, config.parallel_config
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    parallel.worker_cls, parallel.distributed_executor_backend = GPU_WORKER, "uni"
    device = os.environ["KVCACHED_DEVICE"]
    # vLLM counts GPUs as the machine does, kvcached as the process, by CUDA_VISIBLE_DEVICES.
    index = current_platform.visible_device_id_to_physical_device_id(int(device.partition(":")[2]))
    if parallel.assigned_physical_gpu_ids not in (None, [index]):
        raise ValueError(
            f"--device-ids {parallel.assigned_physical_gpu_ids} is not the GPU of KVCACHED_DEVICE, "
            f"{device}: leave it out"
        )
    parallel.assigned_physical_gpu_ids = [index]
