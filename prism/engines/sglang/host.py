"""Builds SGLang for one model in this process, and tears it down completely.

SGLang keeps the running engine in process globals (configuration, process groups, layer state).
`build` sets them, and `tear_down` clears those that would break the next build.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from prism.engines.sglang.platform import stubs

stubs.install()

from sglang.srt import platforms  # noqa: E402
from sglang.srt.configs import update_config  # noqa: E402
from sglang.srt.distributed.parallel_state import (  # noqa: E402
    destroy_distributed_environment,
    destroy_model_parallel,
)
from sglang.srt.layers.rotary_embedding import factory as rotary_factory  # noqa: E402
from sglang.srt.managers import mm_schedule  # noqa: E402
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator  # noqa: E402
from sglang.srt.model_executor import input_buffers, model_runner  # noqa: E402
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput  # noqa: E402
from sglang.srt.model_executor.runner import eager_runner  # noqa: E402
from sglang.srt.runtime_context import (  # noqa: E402
    SpawnRanks,
    get_schedule,
    publish,
    reset_context,
)
from torch.distributed import HashStore, Store, register_rendezvous_handler  # noqa: E402

from kvcached.engines.sglang.hybrid import install as hybrid_pools  # noqa: E402
from kvcached.engines.sglang.kv_pool import pool_bytes  # noqa: E402
from kvcached.engines.sglang.platform import bind_threads  # noqa: E402
from prism.config.schema.cluster_config import EngineConfig  # noqa: E402
from prism.engines.ranks.group import RankGroup  # noqa: E402
from prism.engines.sglang import (  # noqa: E402
    decode_graphs,
    lora_adapters,
    server_args,
)
from prism.engines.sglang.memory import EngineMemory  # noqa: E402
from prism.engines.sglang.platform import gpu, noise, rotary, supported_models  # noqa: E402
from prism.engines.sglang.scheduling.scheduler import InProcessScheduler  # noqa: E402
from prism.messages.engine import ActivateEngine  # noqa: E402
from prism.models.text_part import has_parts, language_model_folder, text_config  # noqa: E402

stubs.install_after_import()
noise.install()
KVCacheConfigurator._profile_available_bytes = pool_bytes
hybrid_pools.install()
_build_input_buffers = eager_runner.build_eager_registry
_libc = ctypes.CDLL(None)
_RENDEZVOUS_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_EVICTION_TOKENS = 128  # SGLang's own, since each eviction takes time


@wraps(_build_input_buffers)
def input_buffers_of(*, max_num_token: int, max_bs: int, **options: Any) -> Any:
    """Returns input buffers for the largest batch. SGLang's are for all tokens of the KV space, 48
    bytes each: over 1 GB for a small model on a large GPU.

    A prefill takes requests until it has `max_prefill_tokens`, so the last one may exceed them by a
    context, which is not longer than that.
    """
    largest = max(2 * get_schedule().max_prefill_tokens, max_bs)
    return _build_input_buffers(max_num_token=min(max_num_token, largest), max_bs=max_bs, **options)


def sizes_as_on_gpu(model_config: Any, load_config: Any, ranks: int) -> Any:
    """Returns the configuration without the padding of SGLang on a CPU, which makes heads and MLPs
    of several ranks larger than the ledger counts. Only the keys that its models read are added."""
    for config in (model_config.hf_config, model_config.hf_text_config):
        update_config.adjust_tp_num_heads_if_necessary(config, ranks, True)
    return model_config


eager_runner.build_eager_registry = input_buffers_of
model_runner.adjust_config_with_unaligned_cpu_tp = sizes_as_on_gpu


def build(
    order: ActivateEngine, memory: EngineMemory, engine: EngineConfig, device: str = "host:0"
) -> InProcessScheduler:
    """Loads the model and lays out its KV space in `memory`.

    Raises any error of SGLang for bad files; the caller must then call `tear_down(None)`.
    """
    platforms.current_platform.memory = memory
    _set_pool_variables(order, engine)
    with ExitStack() as files:
        return _built(_of_language_model(order, files), memory, engine, device)


def _set_pool_variables(order: ActivateEngine, engine: EngineConfig) -> None:
    """Sets what SGLang reads of pools of windows and of states. A request then holds no more than
    what is planned for it."""
    evicted_tokens = min(_EVICTION_TOKENS, engine.prefill_chunk_tokens)
    os.environ |= {
        "SGLANG_MAMBA_CONV_DTYPE": order.model.dtype,
        "SGLANG_SWA_EVICTION_INTERVAL": str(evicted_tokens),
        "SGLANG_OPT_RELEASE_PREFILL_SWA": "1",  # of prompts, when answers are past the window
    }


def _of_language_model(order: ActivateEngine, files: ExitStack) -> ActivateEngine:
    """Returns the order with a folder of the language model, for a model of images or audio that is
    served for text alone. The folder exists until `files` are closed."""
    if order.model.images is not None:
        return order
    path = Path(order.model.path)
    config = json.loads((path / "config.json").read_text())
    if not has_parts(config):
        return order
    text = text_config(config)
    text["architectures"] = [supported_models.causal_class(text["model_type"])]
    folder = files.enter_context(language_model_folder(path, text))
    model = msgspec.structs.replace(order.model, path=str(folder))
    return msgspec.structs.replace(order, model=model)


def _built(
    order: ActivateEngine, memory: EngineMemory, engine: EngineConfig, device: str
) -> InProcessScheduler:
    ranks = memory.ranks
    arguments = server_args.build(order, memory.plan, engine, ranks=ranks.size, device=device)
    index = gpu.index_of(device) if gpu.is_gpu(device) else ranks.rank
    place = SpawnRanks(world_rank=ranks.rank, gpu_id=index)
    bind_threads(ranks.size)
    publish(arguments, role="scheduler", ranks=place)
    pins = nullcontext() if gpu.is_gpu(device) else lora_adapters.Unpinned()
    with _rendezvous(ranks), pins:
        scheduler = InProcessScheduler(arguments, server_args.ports())
    rotary.fix_factors(scheduler.tp_worker.model_runner.model, order.model.context_length)
    scheduler.start()
    return scheduler


def tear_down(scheduler: InProcessScheduler | None, device: str = "host:0") -> None:
    """Removes SGLang from this process. Idempotent. REQUIRES: the caller drops its own references
    to `scheduler`."""
    gpu.synchronize(device)
    if scheduler is not None:
        decode_graphs.drop(scheduler)
        scheduler.grammar_manager.close()
        scheduler.metrics_reporter._shutdown_fpm()
        scheduler.release_host_resources()
    destroy_model_parallel()
    destroy_distributed_environment()
    reset_context()
    _forget_tensors()
    platforms.current_platform.memory = None


def _forget_tensors() -> None:
    """Drops the tensors of the former model that SGLang keeps in its modules."""
    input_buffers._forward_input_buffer_pool.clear()
    rotary_factory._ROPE_DICT.clear()
    GraphSharedOutput._process_shared = None
    mm_schedule.embedding_cache = None  # vectors of images


def release_heap(device: str = "host:0") -> None:
    """Returns freed memory to the system: collects cycles, then trims torch's cache and glibc's
    heap."""
    gc.collect()
    gpu.return_cached(device)
    _libc.malloc_trim(0)


@contextmanager
def _rendezvous(ranks: RankGroup) -> Iterator[None]:
    """Makes torch.distributed keep the rendezvous of the ranks in a file, instead of a TCP port. A
    single rank keeps it in memory.

    The file must exist as long as the process groups, in threads that poll it or, after an error,
    in a traceback: a group waits for a missing file to appear, and reads a shorter one forever.
    torch removes it with the last rank's group.
    """
    url = "prism-one-rank://" if ranks.size == 1 else f"file://{ranks.rendezvous_path()}"
    os.environ[_RENDEZVOUS_VARIABLE] = url
    try:
        yield
    finally:
        del os.environ[_RENDEZVOUS_VARIABLE]


def _one_rank(*_arguments: object, **_named: object) -> Iterator[tuple[Store, int, int]]:
    yield HashStore(), 0, 1


register_rendezvous_handler("prism-one-rank", _one_rank)


def import_models() -> None:
    """Imports every model class of SGLang, so that forked engines need not import them."""
    importlib.import_module("sglang.srt.models.registry")
    importlib.import_module("prism.engines.sglang.towers").install()
